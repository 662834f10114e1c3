"""Numbers watched while a model trains: what is wrong is said in one sentence, at the update or epoch it shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

WINDOW = 8
"""Updates whose mean loss is looked at."""
WORST = 15.0
"""Nats a token: worse than guessing among three million words."""
UNIFORM = 50
"""Updates after which a mask that is the same everywhere is no accident."""
PATIENCE = 3
"""Looks without any progress after which learning has stalled."""


_LEARNED = {"acquisition": 100.0, "new_nll": -0.05, "loss": -0.05}
"""What progress is measured by, the first that is known, and what counts as learned; larger is better."""
_ORDER = tuple(_LEARNED)

ZERO_EVIDENCE = (
    "The evidence is zero everywhere, so the gate holds nothing back: the anchors and probes are fitted to the last "
    "bit, or none of them reaches the trained weights. Check them."
)


class Exploded(ArithmeticError):
    """The loss grew beyond anything that learning explains."""


@dataclass(kw_only=True)
class Watch:
    """What was seen so far, in plain values that a checkpoint can hold; `said` keeps each sentence once.

    A loss that is not a number or explodes raises; everything else returns a sentence or None, and training goes on.
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

        >>> watch = Watch()
        >>> for step in range(1, 9): watch.stepped(step, 1.0)
        >>> watch.stepped(9, 40.0)
        Traceback (most recent call last):
        ...
        cplus.health.Exploded: the loss exploded: a mean of 5.875 over the last 8 updates at step 9, after 1.000 at \
the first. Lower the learning rate, clip the gradient or check the rows
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
        """The evidence's norm: none at all protects nothing."""
        if norm > 0.0:
            return None
        return self._say(ZERO_EVIDENCE)

    def gated(self, admitted: float, steps: int) -> str | None:
        """The share of coordinates that the masks of so many updates admitted."""
        self.uniform = steps + (self.uniform if admitted == self.share else 0)
        self.share = admitted
        if admitted not in (0.0, 1.0) or self.uniform < UNIFORM:
            return None
        if admitted == 0.0:
            return self._say(
                f"The gate held every coordinate back for {UNIFORM} updates: nothing is learned. Check that new rows "
                "and anchors are not the same questions with other answers."
            )
        return self._say(
            f"The gate admitted every coordinate for {UNIFORM} updates: this is plain fine-tuning. Check that the "
            "anchors and probes reach the trained weights."
        )

    def looked(self, point: Mapping[str, float]) -> str | None:
        """What is known after an epoch: whether the new rows are still being learned."""
        name = next((name for name in _LEARNED if name in point), None)
        if name is None or (self.measure and _ORDER.index(name) > _ORDER.index(self.measure)):
            return None  # an epoch without the look that the others had
        if name != self.measure:
            self.measure, self.seen = name, []
        self.seen = [*self.seen[-PATIENCE:], point[name] if name == "acquisition" else -point[name]]
        if len(self.seen) <= PATIENCE or max(self.seen[1:]) > self.seen[0] or self.seen[-1] >= _LEARNED[name]:
            return None
        shown = f"Acquisition is {point[name]:.1f} %" if name == "acquisition" else f"the loss is {point[name]:.3f}"
        return self._say(
            f"Learning stalled: {shown} and was no better in the last {PATIENCE} looks. Raise the learning rate, or "
            "check that the new rows do not contradict the anchors or each other."
        )

    def _say(self, sentence: str) -> str | None:
        if any(earlier.split(":")[0] == sentence.split(":")[0] for earlier in self.said):
            return None
        self.said.append(sentence)
        return sentence


def explosion(first: Sequence[float]) -> float:
    """The mean loss above which a training that began with these losses has exploded, in nats a token.

    >>> explosion([1.0] * WINDOW), explosion([1.0, 700.0]), explosion([9.0])
    (5.0, 15.0, 27.0)
    """
    whole = len(first) >= WINDOW
    return 3.0 * median(first) + 2.0 if whole else max(WORST, 3.0 * first[0])
