"""Repair: undo after training the weight changes that past behaviour needs most and the new rows least."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from cplus.base.cost import Work
from cplus.base.terminal import progress
from cplus.core.evidence import borrowed_gradients
from cplus.core.losses import answer_losses
from cplus.core.rows import Encoded, batched, measured
from cplus.evaluation.statistics import token_loss
from cplus.methods.objectives import Material
from cplus.models.scoring import log_likelihoods, read_targets, score_candidates

# What must stay known in a repair: measured with the base and the tuned model, and held after each trial.


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


# How much rows depend on each weight: the mean squared gradient, example by example, or the mean gradient.


Computing = Callable[[], AbstractContextManager[object]]
"""Opens the context of one pass, such as autocast; it is opened anew for each pass because the weights change."""


@dataclass(kw_only=True)
class Sums:
    """Gradients, squared or not, of the first `rows` rows, summed: one float32 tensor per parameter."""

    tensors: list[Tensor]
    rows: int = 0

    @staticmethod
    def zeros(params: Sequence[nn.Parameter]) -> Sums:
        """Nothing summed yet."""
        return Sums(tensors=[torch.zeros_like(p, dtype=torch.float32) for p in params])

    def means(self) -> list[Tensor]:
        """The means in place of the sums, which are not needed any more; a weight that is not a number is an error."""
        norms = torch.stack([total.sum() for total in self.tensors])
        if not bool(torch.isfinite(norms).all()):
            raise FloatingPointError(
                "the gradients are not finite: a model's weights or its loss on a row are not numbers; check "
                "both models with 'cplus evaluate'"
            )
        return [total.div_(self.rows) for total in self.tensors]


def add_gradients(
    model: nn.Module,
    rows: Sequence[Encoded],
    params: Sequence[nn.Parameter],
    sums: Sums,
    *,
    squared: bool = True,
    computing: Computing = nullcontext,
    after: Callable[[Sums], None] = lambda sums: None,
) -> Sums:
    """Add what is not summed yet: each row's squared gradient, row by row, or the gradient, batch by batch.

    F[j] = mean_i (d loss_i / d theta_j)^2, loss_i the mean cross-entropy over the target tokens of row i

    A gradient is added and freed as soon as it is complete, so that at most one tensor's is held at a time; `after` is
    called after each pass.
    """
    done = 0
    with borrowed_gradients(model, params), _adding(model, params, sums.tensors, squared=squared):
        for batch in ([row] for row in rows) if squared else batched(rows):
            done += len(batch)
            if done <= sums.rows:
                continue
            with computing():
                loss = answer_losses(model, batch).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            sums.rows = done
            after(sums)
    return sums


@contextmanager
def _adding(
    model: nn.Module, params: Sequence[nn.Parameter], totals: Sequence[Tensor], *, squared: bool
) -> Iterator[None]:
    """Add each gradient of these parameters alone, or its square, to its total as soon as it is complete; free it."""
    places = {id(p): total for p, total in zip(params, totals, strict=True)}
    before = [(p, p.requires_grad) for p in model.parameters()]

    def add(p: Tensor) -> None:
        assert p.grad is not None
        gradient, total = p.grad.float(), places[id(p)]
        total.addcmul_(gradient, gradient) if squared else total.add_(gradient)
        p.grad = None

    for p, _ in before:
        p.requires_grad_(id(p) in places)  # merged adapters leave a model frozen
    own: list[Any] = list(params)  # torch leaves the next call without types
    hooks = [p.register_post_accumulate_grad_hook(add) for p in own]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for p, required in before:
            p.requires_grad_(required)


# The order in which weights are undone: a score per weight, two bytes each, and the weights above a threshold.


Score: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From one tensor's past importance, new importance and change (tuned - base) to a score: higher is undone sooner."""

DAMPING = 1e-3
_NEVER = -(2**15)
"""The code of a weight that did not move; below that of every score."""
_CODES = 2**16
_CHUNK = 2**24


def ratio(past: Tensor, new: Tensor, delta: Tensor) -> Tensor:
    """F_past / (F_new + 1e-3 mean(F_new)), the mean over the tensor.

    >>> ratio(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.1, 0.1])).tolist()
    [1.9980019330978394, 0.0]
    """
    damping = (DAMPING * new.mean()).clamp(min=torch.finfo(new.dtype).tiny)
    return past / (new + damping)


def blame(gradient: Tensor, delta: Tensor) -> Tensor:
    """How much of the rise of the past loss a weight's change explains, to first order; above 0 it did harm.

    >>> blame(torch.tensor([0.5, -0.5]), torch.tensor([0.1, 0.1])).tolist()
    [0.05000000074505806, -0.05000000074505806]
    """
    return gradient * delta


def encode(scores: Tensor, delta: Tensor) -> Tensor:
    """Scores as int16 codes in the same order: the bits of their bfloat16, which tell apart scores 1 % apart.

    >>> encode(torch.tensor([-2.0, 0.5, 3.0, 9.0]), torch.tensor([1.0, 1.0, -1.0, 0.0])).tolist()
    [-16385, 16128, 16448, -32768]
    """
    if not bool(torch.isfinite(scores).all()):
        raise FloatingPointError("expected finite scores, got one that is not; check the score function")
    bits = (scores.to(torch.bfloat16) + 0.0).view(torch.int16)  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFF, bits)  # a larger negative number has larger bits
    return torch.where(delta == 0, _NEVER, ordered).to(torch.int16)


class Ranking:
    """Codes of every weight, and how many weights lie above each code, counted exactly and without sorting.

    A share is one of the weights, or with `by_sum`, where all scores are positive, one of the sum of their scores.
    """

    def __init__(self, codes: Sequence[Tensor], *, by_sum: bool = False) -> None:
        self.codes = list(codes)
        counts = torch.zeros(_CODES, dtype=torch.int64)
        for own in self.codes:
            for part in torch.split(own.flatten(), _CHUNK):
                counts += torch.bincount(part.int() - _NEVER, minlength=_CODES).cpu()
        counts[0] = 0  # weights that did not move
        self._above = counts.flip(0).cumsum(0).flip(0)
        weighed = counts * _values() if by_sum else counts
        self._weight = weighed.flip(0).cumsum(0).flip(0)

    def threshold(self, share: float) -> int:
        """The lowest code such that at most this share of the weights, or of the sum, has it or a higher one."""
        # No score has the last code, which is that of no number, so that even a share of 0 has a threshold.
        return int((self._weight[1:] <= share * self._weight[0]).nonzero()[0]) + 1 + _NEVER

    def count(self, threshold: int) -> int:
        """The number of weights with this code or a higher one."""
        return int(self._above[threshold - _NEVER])


def _values() -> Tensor:
    """The score of each code from 0 on, in double precision; 0 for a code that no number has, and below."""
    values = torch.arange(-_NEVER, dtype=torch.int16).view(torch.bfloat16).double().nan_to_num(0.0, posinf=0.0)
    return torch.cat([torch.zeros(-_NEVER, dtype=torch.float64), values])


@torch.no_grad()
def undo(
    params: Sequence[Tensor], base: Sequence[Tensor], tuned: Sequence[Tensor], codes: Sequence[Tensor], threshold: int
) -> None:
    """Write the base's value where a weight's code reaches the threshold, else the tuned one; both are exact."""
    for p, before, after, own in zip(params, base, tuned, codes, strict=True):
        p.copy_(torch.where(own >= threshold, before.to(after), after))


# A search for the largest share whose effect stays within a tolerance.


RESOLUTION = 0.01
"""The share is found to within this much."""
TRIALS = math.ceil(math.log2(1 / RESOLUTION))
"""Evaluations of the new rows in one search by bisection."""
ENOUGH = 0.85
"""A loss ends the search where this much of the tolerance is used."""
_AIM = 0.95
_WITHIN = 0.1


def largest_share(used: Callable[[float], float], resolution: float, *, smooth: bool = False) -> float:
    """The largest share that uses at most 1 of the tolerance, by bisection; 0 if there is none.

    More undone is taken to use more. Where that fails in between, the share found may be smaller than the largest one,
    but it is always one that was tried. What is smooth in the share is tried where the line through the two nearest
    shares would use 95 %, or halfway after a trial that did not halve the range, and the search ends where at least
    85 % is used.

    >>> largest_share(lambda share: share / 0.4, resolution=0.01)
    0.3984375
    >>> tried = []
    >>> largest_share(lambda share: tried.append(share) or (share / 0.4) ** 2, resolution=0.01, smooth=True)
    0.3781094527363184
    >>> tried
    [0.5, 0.304, 0.3781094527363184]
    """
    low, high, at_low, at_high, slow = 0.0, 1.0, 0.0, math.inf, False
    while high - low > resolution and not (smooth and at_low >= ENOUGH):
        width, part = high - low, 0.5
        if smooth and not slow and math.isfinite(at_high):
            part = min(max((_AIM - at_low) / (at_high - at_low), _WITHIN), 1 - _WITHIN)
        share = low + part * width
        found = used(share)
        if found <= 1:
            low, at_low = share, found
        else:
            high, at_high = share, found
        slow = high - low > width / 2
    return low


def used_of(value: float, tuned: float, limit: float) -> float:
    """How much of what may be given up is given up; up to 1 a value is within its limit."""
    if value <= limit:
        return min(1.0, (value - tuned) / (limit - tuned)) if limit > tuned else 0.0
    return (value - tuned) / (limit - tuned) if value - tuned > limit - tuned > 0 else math.inf


# The weights of a base and a tuned model: checked to match, and written into one model.


class Weights:
    """The parameters that differ between base and tuned model, with both values."""

    def __init__(self, model: nn.Module, base: Mapping[str, Tensor]) -> None:
        own = dict(model.named_parameters())
        moved = moved_weights(base, own)
        self.parameters = sum(p.numel() for p in own.values())
        self.moved = sum(int((base[name].to(own[name]) != own[name]).sum()) for name in moved)
        self.params = [own[name] for name in moved]
        self.base = [base[name].detach() for name in moved]
        self.tuned = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def between(self, part: float) -> None:
        """The weights part of the way from base to tuned."""
        for p, before, after in zip(self.params, self.base, self.tuned, strict=True):
            p.copy_(torch.lerp(before.to(after), after, part))

    def deltas(self) -> Iterator[Tensor]:
        """What training changed, one tensor at a time."""
        return (after - before.to(after) for before, after in zip(self.base, self.tuned, strict=True))

    @torch.no_grad()
    def write(self, values: Sequence[Tensor]) -> None:
        """The base's or the tuned weights, exactly."""
        for p, value in zip(self.params, values, strict=True):
            p.copy_(value)


def moved_weights(base: Mapping[str, Tensor], tuned: Mapping[str, Tensor]) -> list[str]:
    """The names of the weights that training changed; weights that are not a pair, or all the same, are refused."""
    expected = "expected the model that the tuned one was trained from"
    if lone := sorted(base.keys() ^ tuned.keys()):
        whose = "base" if lone[0] in base else "tuned"
        raise ValueError(
            f"base and tuned model differ in {len(lone)} weights: only the {whose} model has {lone[0]}; {expected}"
        )
    if different := [name for name in base if base[name].shape != tuned[name].shape]:
        was, now = (list(own[different[0]].shape) for own in (base, tuned))
        raise ValueError(
            f"base and tuned model differ in the shape of {len(different)} weights: {different[0]} is {was} in the "
            f"base and {now} in the tuned model; {expected}"
        )
    if moved := [name for name, p in tuned.items() if not torch.equal(base[name].to(p), p)]:
        return moved
    raise Unrepairable("base and tuned model have the same weights, so there is nothing to undo")


# The largest share of weights that can be undone with the new rows still known.


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
        weights.write(weights.base)
        self._base, base_past = self._measured(), self._past()
        for check, base, tuned in zip(checks, self._base, self._tuned, strict=True):
            if not (check.held_out or tuned < base):
                raise Unrepairable(
                    f"the tuned model has not learned the {check.name} rows, so there is nothing to keep: {base:.3f} "
                    f"{check.unit} with the base model, {tuned:.3f} with the tuned one; give the rows it was trained on"
                )
        self._limits = [c.limit(b, t) for c, b, t in zip(checks, self._base, self._tuned, strict=True)]
        self._past_levels = base_past, tuned_past
        self._best: tuple[float, Sequence[float], Ranking, int] | None = None
        """Of the best round: its past loss, what was measured on the new rows, and which weights were undone."""
        self._shares: list[float] = []
        self._trials = 0

    def round(self, ranking: Ranking) -> None:
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
        share = largest_share(used, RESOLUTION, smooth=smooth)
        threshold = ranking.threshold(share)
        self._shares.append(share)
        self._trials += len(found)
        self._put(ranking, threshold)
        if share > 0:
            past = self._past()
            # A gate may have lowered the past rows' loss below the base's, on the rows it saw.
            base = self._past_levels[0]
            if self._best is None or max(0.0, past - base) < max(0.0, self._best[0] - base):
                self._best = past, found[share], ranking, threshold

    def result(self, past_rows: int, new_rows: int) -> Repaired:
        """The best round, its weights in the model."""
        base_past, tuned_past = self._past_levels
        if self._best is None:
            raise Unrepairable(
                "no share of the changes can be undone with the new rows still known (allowed: at most "
                f"{self._shown(self._limits)}); allow more with a larger tolerance, or use the tuned model as it is"
            )
        past, values, ranking, threshold = self._best
        undone, moved = ranking.count(threshold), self._weights.moved
        if past >= max(base_past, tuned_past):
            raise Unrepairable(
                f"undoing {100 * undone / moved:.1f} % of the changes does not lower the loss of the past rows "
                f"({tuned_past:.3f} nats per token with the tuned model, {past:.3f} after, "
                f"{base_past:.3f} with the base): there is nothing to repair"
            )
        self._put(ranking, threshold)
        levels = zip(self._checks, self._base, self._tuned, values, self._limits, strict=True)
        return Repaired(
            undone=undone,
            moved=moved,
            parameters=self._weights.parameters,
            new=tuple(
                Levels(name=c.name, unit=c.unit, base=b, tuned=t, repaired=v, limit=limit)
                for c, b, t, v, limit in levels
            ),
            past=Levels(name="past", unit="nats per token", base=base_past, tuned=tuned_past, repaired=past),
            past_rows=past_rows,
            new_rows=new_rows,
            shares=tuple(self._shares),
            trials=self._trials,
        )

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


# Repair a fine-tuned model in memory: from its weights, the base's weights and encoded rows, independent of jobs.


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
    if rounds < 1:
        raise ValueError(f"expected at least one round, got {rounds}")
    training = model.training
    weights = Weights(model, base_weights)
    model.eval()
    try:
        search = Search(model, weights, checks or (loss_check(new_rows),), past_rows, computing, notify)

        def means(name: str, rows: Sequence[Encoded], *, squared: bool = True) -> list[Tensor]:
            return _means(model, weights.params, name, rows, squared=squared, computing=computing, store=store)

        if by == "importance":
            weights.write(weights.base)
            past = [own.bfloat16() for own in means("past", past_rows)]
        weights.between(TOWARDS if by == "importance" else HALFWAY)
        for number in range(1, rounds + 1):
            if by == "importance":
                found = zip(past, means(f"new {number}", new_rows), weights.deltas(), strict=True)
                codes = [encode(score(was.float(), now, delta), delta) for was, now, delta in found]
            else:
                gradients = iter(means(f"past {number}", past_rows, squared=False))  # used up before the search
                scores = map(blame, gradients, weights.deltas())
                codes = [encode(own, own.clamp(min=0.0)) for own in scores]  # what did no harm is not undone
            search.round(Ranking(codes, by_sum=by == "blame"))
        return search.result(len(past_rows), len(new_rows))
    except BaseException:
        weights.write(weights.tuned)
        raise
    finally:
        model.train(training)


def _means(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    name: str,
    rows: Sequence[Encoded],
    *,
    squared: bool,
    computing: Computing,
    store: Store | None,
) -> list[Tensor]:
    """The means over rows of squared gradients, or of gradients, continued from what the store holds."""
    sums = (store and store.load(name, params)) or Sums.zeros(params)
    with progress() as bars:
        what = f"repair: {'importance for' if squared else 'gradient of'} {name.split()[0]} rows"
        bar = bars.add_task(what, total=len(rows), completed=sums.rows)

        def after(sums: Sums) -> None:
            bars.update(bar, completed=sums.rows)
            if store is not None:
                store.save(name, sums, complete=sums.rows == len(rows))

        add_gradients(model, rows, params, sums, squared=squared, computing=computing, after=after)
    return sums.means()


# The repair that a row of the table of methods ends with, on the tokens that training saw.


def known_rows(model: nn.Module, material: Material) -> tuple[set[Encoded], Work]:
    """The new rows that a model knows, and the forward passes that this took.

    A row with choices is known if its target is the best of them by mean token log-likelihood, as Acquisition counts
    it; any other if each of its target tokens is the likeliest one after those before it.
    """
    choices = {row: own for row in material.new if len(own := material.choices.get(row, ())) > 1}
    scores = score_candidates(model, [row.prompt for row in choices], list(choices.values()), what="known rows")
    known = {
        row
        for (row, own), found in zip(choices.items(), scores, strict=True)
        if own[max(range(len(own)), key=lambda i: found[i].mean)] == row.target
    }
    others = [row for row in material.new if row not in choices]
    readings = read_targets(model, others, what="known rows")
    known |= {row for row, reading in zip(others, readings, strict=True) if reading.likeliest}
    passed = sum(len(row.prompt) + sum(map(len, own)) for row, own in choices.items())
    return known, Work(forward=passed + sum(measured(part).padded for part in batched(others)))


def repair_material(
    model: nn.Module, base: Mapping[str, Tensor], material: Material, computing: Computing
) -> tuple[Work, Repaired | str]:
    """The passes that the repair of a trained model needed, and what it did, or why it did nothing.

    One percentage point of new rows with choices may become unknown (`known_rows`); the loss of free text, and of rows
    with choices of which the tuned model knows less than half, may rise by 5 % of its fall instead, on at most 64 of
    them. Weights are ranked by importance where rows have choices, else by blame.
    """
    past, new = [*material.rows("anchors"), *material.rows("probes")], list(material.new)
    read = Work()

    def unknown(model: nn.Module) -> float:
        nonlocal read
        known, passed = known_rows(model, material)
        read += passed
        return 100 * sum(row not in known for row in new) / len(new)

    free = not any(len(own) > 1 for own in material.choices.values())
    with computing():
        by_loss = free or unknown(model) > 50.0
    few = judged(new) if by_loss else []
    check = loss_check(few) if by_loss else Check(name="new", unit="% not known", measure=unknown, tolerance=POINTS)
    weights = {name: base.get(name, p.detach()) for name, p in model.named_parameters()}
    work = sum(map(measured, batched(past) if free else ([row] for row in (*past, *new))), Work())
    found: Repaired | str
    try:
        by: By = "blame" if free else "importance"
        found = repair_model(model, weights, past, new, checks=[check], by=by, computing=computing)
        tried = found.trials
    except Unrepairable as error:
        found, tried = str(error), TRIALS
    # Past rows are read by base, tuned and repaired model, new rows by base and tuned model and at every trial.
    passes = sum(
        count * measured(part).padded for count, rows in ((3, past), (2 + tried, few)) for part in batched(rows)
    )
    return work + read + Work(forward=passes), found
