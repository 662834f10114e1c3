"""What must stay known in a repair: measured with the base and the tuned model, and held after each trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from cplus.data.encoded import Encoded
from cplus.evaluation.statistics import token_loss
from cplus.scoring import log_likelihoods

FALL = 0.05
"""Free text: how much of the fall of the new loss may be given up."""
LOSS_ROWS = 64
"""Free text: the most rows of a trial; the mean over their tokens is close to that of all rows."""
POINTS = 1.0
"""Multiple choice: how many percentage points of Acquisition may be given up."""


class Unrepairable(ValueError):
    """There is nothing to undo, nothing to keep, or no share that keeps it; the tuned model is as it was."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Rows that must stay known: `measure` gives their loss, or the percentage of them that is not known."""

    name: str
    unit: Literal["nats per token", "% not known"]
    measure: Callable[[nn.Module], float]
    tolerance: float
    """For a loss the share of its fall from base to tuned, for a percentage the points, that may be given up."""
    held_out: bool = False
    """Rows not trained on: the tuned model need not have learned them."""

    def limit(self, base: float, tuned: float) -> float:
        """The highest value that still counts as known.

        >>> check = Check(name="new", unit="nats per token", measure=lambda model: 0.0, tolerance=0.05)
        >>> check.limit(base=3.0, tuned=1.0)
        1.1
        """
        if self.unit == "% not known":
            return tuned + self.tolerance
        return tuned + self.tolerance * max(0.0, base - tuned)

    def require_learned(self, base: float, tuned: float) -> None:
        """Refuse a tuned model that does not know the rows better than the base model."""
        if self.held_out or tuned < base:
            return
        raise Unrepairable(
            f"the tuned model has not learned the {self.name} rows, so there is nothing to keep: {base:.3f} "
            f"{self.unit} with the base model, {tuned:.3f} with the tuned one; give the rows it was trained on"
        )


def loss_check(rows: Sequence[Encoded], *, name: str = "new", tolerance: float = FALL, held_out: bool = False) -> Check:
    """The mean loss per target token must stay within a share of its fall from base to tuned."""

    def measure(model: nn.Module) -> float:
        return mean_loss(model, rows, what=f"repair: {name} loss")

    return Check(name=name, unit="nats per token", measure=measure, tolerance=tolerance, held_out=held_out)


def judged(rows: Sequence[Encoded]) -> Sequence[Encoded]:
    """At most LOSS_ROWS of the rows, evenly spaced.

    >>> len(judged(range(65))), judged(range(128))[:3], judged(range(5))
    (64, [0, 2, 4], range(0, 5))
    """
    if len(rows) <= LOSS_ROWS:
        return rows
    return [rows[i * len(rows) // LOSS_ROWS] for i in range(LOSS_ROWS)]


def mean_loss(model: nn.Module, rows: Sequence[Encoded], *, what: str) -> float:
    """The mean loss per target token."""
    return token_loss((score.total, score.num_tokens) for score in log_likelihoods(model, rows, what=what))
