"""Checks of the numbers during training: each problem is reported in one sentence when it first shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

WINDOW = 8
"""Number of updates whose mean loss is checked."""
WORST = 15.0
"""Nats per token: worse than guessing among three million words."""
UNIFORM = 50
"""Number of updates after which a mask that is the same everywhere is no coincidence."""
PATIENCE = 3
"""Number of evaluations without progress after which learning has stalled."""


_LEARNED = {"acquisition": 100.0, "new_nll": -0.05, "loss": -0.05}
"""The measures of progress, in order of preference, and the value that counts as learned; larger is better."""
_ORDER = tuple(_LEARNED)

ZERO_EVIDENCE = (
    "The evidence is zero everywhere, so the gate has no effect: the anchors and probes are already fitted exactly, or "
    "their loss does not depend on the trained weights. Check the anchors and probes."
)


class Exploded(ArithmeticError):
    """The loss grew beyond what training can explain."""


@dataclass(kw_only=True)
class Health:
    """What was observed so far, in plain values that a checkpoint can store; `said` holds each warning once.

    A non-finite or exploding loss raises an error; any other check returns a warning or None, and training continues.
    """

    first: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    uniform: int = 0
    share: float = -1.0
    measure: str = ""
    seen: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def stepped(self, step: int, loss: float) -> None:
        """One update's loss.

        >>> health = Health()
        >>> for step in range(1, 9): health.stepped(step, 1.0)
        >>> health.stepped(9, 40.0)
        Traceback (most recent call last):
        ...
        cplus.core.health.Exploded: the loss exploded: a mean of 5.875 over the last 8 updates at step 9, after 1.000 \
at the first. Lower the learning rate, clip the gradient or check the rows
        """
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} at step {step}. Lower the learning rate, clip the gradient or check the batch"
            )
        if len(self.first) < WINDOW:
            self.first.append(loss)
        self.recent = [*self.recent[1 - WINDOW :], loss]
        now, bound = sum(self.recent) / len(self.recent), explosion(self.first)
        if now > bound:
            raise Exploded(
                f"the loss exploded: a mean of {now:.3f} over the last {len(self.recent)} updates at step {step}, "
                f"after {self.first[0]:.3f} at the first. Lower the learning rate, clip the gradient or check the rows"
            )

    def refreshed(self, norm: float) -> str | None:
        """Check the norm of the evidence: zero evidence protects nothing."""
        if norm > 0.0:
            return None
        return self._once(ZERO_EVIDENCE)

    def gated(self, admitted: float, steps: int) -> str | None:
        """Check the share of coordinates that the masks of the last `steps` updates admitted."""
        self.uniform = steps + (self.uniform if admitted == self.share else 0)
        self.share = admitted
        if admitted not in (0.0, 1.0) or self.uniform < UNIFORM:
            return None
        if admitted == 0.0:
            return self._once(
                f"The gate blocked every coordinate for {UNIFORM} updates: nothing is learned. Check that new rows "
                "and anchors are not the same questions with different answers."
            )
        return self._once(
            f"The gate admitted every coordinate for {UNIFORM} updates: this is plain fine-tuning. Check that the loss "
            "of the anchors and probes depends on the trained weights."
        )

    def evaluated(self, point: Mapping[str, float]) -> str | None:
        """Check the results of an epoch: whether the new rows are still being learned."""
        name = next((name for name in _LEARNED if name in point), None)
        if name is None or (self.measure and _ORDER.index(name) > _ORDER.index(self.measure)):
            return None  # this epoch was not evaluated as the others were
        if name != self.measure:
            self.measure, self.seen = name, []
        self.seen = [*self.seen[-PATIENCE:], point[name] if name == "acquisition" else -point[name]]
        if len(self.seen) <= PATIENCE or max(self.seen[1:]) > self.seen[0] or self.seen[-1] >= _LEARNED[name]:
            return None
        shown = f"Acquisition is {point[name]:.1f} %" if name == "acquisition" else f"the loss is {point[name]:.3f}"
        when = f" after epoch {point['epoch']:g}" if "epoch" in point else ""
        return self._once(
            f"Learning stalled: {shown}{when} and has not improved in the last {PATIENCE} evaluations. Raise the "
            "learning rate, or check that the new rows do not contradict the anchors or each other."
        )

    def _once(self, sentence: str) -> str | None:
        """The sentence, or None if one with the same beginning was returned before."""
        if any(earlier.split(":")[0] == sentence.split(":")[0] for earlier in self.said):
            return None
        self.said.append(sentence)
        return sentence


def explosion(first: Sequence[float]) -> float:
    """The mean loss, in nats per token, above which a run that began with these losses has exploded.

    >>> explosion([1.0] * WINDOW), explosion([1.0, 700.0]), explosion([9.0])
    (5.0, 15.0, 27.0)
    """
    whole = len(first) >= WINDOW
    return 3.0 * median(first) + 2.0 if whole else max(WORST, 3.0 * first[0])
