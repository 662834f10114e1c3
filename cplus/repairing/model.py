"""Repair a fine-tuned model in memory: from its weights, the base's weights and encoded rows, independent of jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Literal, Protocol

from torch import Tensor, nn

from cplus.data.encoded import Encoded
from cplus.repairing.checks import Check, loss_check
from cplus.repairing.importance import Computing, Sums, add_gradients
from cplus.repairing.ranking import Ranking, Score, blame, encode, ratio
from cplus.repairing.search import Repaired, Search
from cplus.repairing.share import RESOLUTION
from cplus.repairing.weights import Weights
from cplus.terminal import progress

TOWARDS = 0.7
"""Where on the way from base to tuned the importance of the new rows is computed: at the tuned model it vanishes with
the loss."""
HALFWAY = 0.5
"""Where the gradient of the past rows is computed: there, times the change, it gives the rise to second order."""
By = Literal["importance", "blame"]
"""How weights are ranked: by F_past / F_new, or by their part in the rise of the past loss."""
BYTES_PER_PARAMETER = 18
"""Model, base and tuned weights, the sums in float32, and the past importance in bfloat16."""


class Store(Protocol):
    """Keeps the importance sums of an unfinished repair, so that a later process need not repeat them."""

    def load(self, name: str, params: Sequence[Tensor]) -> Sums | None:
        """The sums kept under this name."""
        ...

    def save(self, name: str, sums: Sums, *, complete: bool) -> None:
        """Called after every row; it may decide not to write yet unless the sums are complete."""
        ...


def repair_model(
    model: nn.Module,
    base_weights: Mapping[str, Tensor],
    past_rows: Sequence[Encoded],
    new_rows: Sequence[Encoded],
    *,
    checks: Sequence[Check] = (),
    by: By = "importance",
    score: Score = ratio,
    rounds: int = 1,
    resolution: float = RESOLUTION,
    towards: float = TOWARDS,
    computing: Computing = nullcontext,
    store: Store | None = None,
    notify: Callable[[str], None] = lambda sentence: None,
) -> Repaired:
    """Reset a tuned model's weights to the base's, in place: those with the highest scores, as many as `checks` admit.

    `base_weights` are by the names of `model.named_parameters()`. Without `checks` the loss of the new rows may rise by
    5 % of its fall. `by="blame"` needs no importance: one gradient of the past rows tells which changes raised their
    loss, and only those are undone. Each round after the first computes the importance of the new rows, or the gradient
    of the past ones, anew at the model repaired by the round before. An error leaves the tuned weights as they were.
    """
    if not past_rows or not new_rows:
        raise ValueError(f"expected past and new rows to repair with, got {len(past_rows)} and {len(new_rows)}")
    if rounds < 1 or not 0 < resolution < 1:
        raise ValueError(f"expected at least one round and a resolution in (0, 1), got {rounds} and {resolution}")
    training = model.training
    weights = Weights(model, base_weights)
    model.eval()
    try:
        search = Search(model, weights, checks or (loss_check(new_rows),), past_rows, computing, notify)
        sums = _Sums(model, weights, computing, store)
        if by == "blame":
            _by_blame(weights, sums, past_rows, search, rounds, resolution)
        else:
            _by_importance(weights, sums, past_rows, new_rows, score, towards, search, rounds, resolution)
        return search.result(len(past_rows), len(new_rows))
    except BaseException:
        weights.tuned_values()
        raise
    finally:
        model.train(training)


def _by_importance(
    weights: Weights,
    sums: _Sums,
    past_rows: Sequence[Encoded],
    new_rows: Sequence[Encoded],
    score: Score,
    towards: float,
    search: Search,
    rounds: int,
    resolution: float,
) -> None:
    weights.base_values()
    past = [own.bfloat16() for own in sums.of("past", past_rows)]
    weights.between(towards)
    for number in range(1, rounds + 1):
        new = sums.of(f"new {number}", new_rows)
        codes = [
            encode(score(was.float(), now, delta), delta)
            for was, now, delta in zip(past, new, weights.deltas(), strict=True)
        ]
        del new
        search.round(Ranking(codes), resolution)


def _by_blame(
    weights: Weights,
    sums: _Sums,
    past_rows: Sequence[Encoded],
    search: Search,
    rounds: int,
    resolution: float,
) -> None:
    weights.between(HALFWAY)
    for number in range(1, rounds + 1):
        gradients = sums.of(f"past {number}", past_rows, squared=False)
        scores = (blame(gradient, delta) for gradient, delta in zip(gradients, weights.deltas(), strict=True))
        codes = [encode(own, own.clamp(min=0.0)) for own in scores]  # what did no harm is not undone
        del gradients
        search.round(Ranking(codes, by_sum=True), resolution)


class _Sums:
    """Computes importance at the model's current weights, or continues from what the store holds."""

    def __init__(self, model: nn.Module, weights: Weights, computing: Computing, store: Store | None) -> None:
        self._model, self._params, self._computing, self._store = model, weights.params, computing, store

    def of(self, name: str, rows: Sequence[Encoded], *, squared: bool = True) -> list[Tensor]:
        """The means over rows of squared gradients, or of gradients."""
        sums = None if self._store is None else self._store.load(name, self._params)
        sums = sums or Sums.zeros(self._params)
        with progress() as bars:
            what = f"repair: {'importance for' if squared else 'gradient of'} {name.split()[0]} rows"
            bar = bars.add_task(what, total=len(rows), completed=sums.rows)

            def after(sums: Sums) -> None:
                bars.update(bar, completed=sums.rows)
                if self._store is not None:
                    self._store.save(name, sums, complete=sums.rows == len(rows))

            add_gradients(
                self._model, rows, self._params, sums, squared=squared, computing=self._computing, after=after
            )
        return sums.means()
