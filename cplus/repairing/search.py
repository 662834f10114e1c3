"""The largest share of weights that can be undone with the new rows still known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from cplus.data.encoded import Encoded
from cplus.repairing.checks import Check, Unrepairable, mean_loss
from cplus.repairing.importance import Computing
from cplus.repairing.ranking import Ranking, undo
from cplus.repairing.share import largest_share, used_of
from cplus.repairing.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Levels:
    """One quantity with the base, tuned and repaired model; lower is better. `limit` is what the search allowed."""

    name: str
    unit: str
    base: float
    tuned: float
    repaired: float
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """What a repair did: the weights it reset to the base's values, and what that changed."""

    undone: int
    moved: int
    parameters: int
    new: tuple[Levels, ...]
    past: Levels
    """The loss of the past rows that the importance was computed from."""
    past_rows: int
    new_rows: int
    shares: tuple[float, ...]
    """The share found in each round, of the weights or of the blame; the round whose past loss is least above the
    base's is the result."""
    trials: int
    """Evaluations of the new rows in all rounds."""

    @property
    def share(self) -> float:
        """The share of the moved weights that was reset."""
        return self.undone / self.moved

    def row(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "share": self.share}

    def __str__(self) -> str:
        new = "; ".join(f"{own.name} rows {own.tuned:.3f} to {own.repaired:.3f} {own.unit}" for own in self.new)
        past = f"{self.past.tuned:.3f} to {self.past.repaired:.3f} (base {self.past.base:.3f})"
        return f"{100 * self.share:.1f} % of the moved weights undone; {new}; past loss {past}"


def repair_row(repaired: Repaired | str | None) -> dict[str, Any] | None:
    """What a record says of a repair: what it did, or why it was refused; None where none was tried."""
    if isinstance(repaired, str):
        return {"refused": repaired}
    return None if repaired is None else repaired.row()


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The result of one round: its past loss, what was measured on the new rows, and which weights were undone."""

    past: float
    values: Sequence[float]
    ranking: Ranking
    threshold: int


class Search:
    """Finds the share of each round and remembers the round whose past loss is least above the base's."""

    def __init__(
        self,
        model: nn.Module,
        weights: Weights,
        checks: Sequence[Check],
        past_rows: Sequence[Encoded],
        computing: Computing,
        notify: Callable[[str], None],
    ) -> None:
        self._model, self._weights, self._checks, self._notify = model, weights, checks, notify
        self._past_rows, self._computing = past_rows, computing
        self._tuned, tuned_past = self._measured(), self._past()
        weights.base_values()
        self._base, base_past = self._measured(), self._past()
        for check, base, tuned in zip(checks, self._base, self._tuned, strict=True):
            check.require_learned(base, tuned)
        self._limits = [c.limit(b, t) for c, b, t in zip(checks, self._base, self._tuned, strict=True)]
        self._past_levels = base_past, tuned_past
        self._best: _Outcome | None = None
        self._shares: list[float] = []
        self._trials = 0

    def round(self, ranking: Ranking, resolution: float) -> None:
        """Search for the share with this ranking; the model is left repaired by it."""
        found: dict[float, list[float]] = {}

        def used(share: float) -> float:
            threshold = ranking.threshold(share)
            self._put(ranking, threshold)
            values = found[share] = self._measured()
            most = max(map(used_of, values, self._tuned, self._limits)) if ranking.count(threshold) else math.inf
            undone = 100 * ranking.count(threshold) / self._weights.moved
            self._notify(f"repair: {undone:.1f} % undone: {self._shown(values)}: {'kept' if most <= 1 else 'too much'}")
            return most

        smooth = all(check.unit == "nats per token" for check in self._checks)
        share = largest_share(used, resolution, smooth=smooth)
        self._shares.append(share)
        self._trials += len(found)
        self._put(ranking, ranking.threshold(share))
        if share > 0:
            found_here = _Outcome(
                past=self._past(), values=found[share], ranking=ranking, threshold=ranking.threshold(share)
            )
            self._best = min(filter(None, (self._best, found_here)), key=lambda outcome: self._above(outcome.past))

    def result(self, past_rows: int, new_rows: int) -> Repaired:
        """The best round, its weights in the model."""
        base_past, tuned_past = self._past_levels
        best = self._best
        if best is None:
            raise Unrepairable(
                "no share of the changes can be undone with the new rows still known (allowed: at most "
                f"{self._shown(self._limits)}); allow more with a larger tolerance, or use the tuned model as it is"
            )
        undone, moved = best.ranking.count(best.threshold), self._weights.moved
        if best.past >= max(base_past, tuned_past):
            raise Unrepairable(
                f"undoing {100 * undone / moved:.1f} % of the changes does not lower the loss of the past rows "
                f"({tuned_past:.3f} nats per token with the tuned model, {best.past:.3f} after, "
                f"{base_past:.3f} with the base): there is nothing to repair"
            )
        self._put(best.ranking, best.threshold)
        levels = zip(self._checks, self._base, self._tuned, best.values, self._limits, strict=True)
        return Repaired(
            undone=undone,
            moved=moved,
            parameters=self._weights.parameters,
            new=tuple(
                Levels(name=c.name, unit=c.unit, base=b, tuned=t, repaired=v, limit=limit)
                for c, b, t, v, limit in levels
            ),
            past=Levels(name="past", unit="nats per token", base=base_past, tuned=tuned_past, repaired=best.past),
            past_rows=past_rows,
            new_rows=new_rows,
            shares=tuple(self._shares),
            trials=self._trials,
        )

    def _above(self, past: float) -> float:
        """How far the past rows' loss lies above the base's; a gate may have lowered it below, on the rows it saw."""
        return max(0.0, past - self._past_levels[0])

    def _put(self, ranking: Ranking, threshold: int) -> None:
        undo(self._weights.params, self._weights.base, self._weights.tuned, ranking.codes, threshold)

    def _shown(self, values: Sequence[float]) -> str:
        return ", ".join(f"{c.name} {value:.3f} {c.unit}" for c, value in zip(self._checks, values, strict=True))

    def _measured(self) -> list[float]:
        values = []
        for check in self._checks:
            with self._computing():
                values.append(check.measure(self._model))
        return values

    def _past(self) -> float:
        with self._computing():
            return mean_loss(self._model, self._past_rows, what="repair: past loss")
