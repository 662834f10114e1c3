"""Repair: undo after training the weight changes that past behaviour needs most and the new rows least."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cplus.base.terminal import progress
from cplus.core.evidence import borrowed_gradients
from cplus.core.losses import answer_losses
from cplus.core.rows import Encoded, batched
from cplus.evaluation.statistics import token_loss
from cplus.models.scoring import log_likelihoods

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
    measure = partial(mean_loss, rows=rows, what=f"repair: {name} loss")
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


def mean_gradients(
    model: nn.Module,
    rows: Sequence[Encoded],
    params: Sequence[nn.Parameter],
    *,
    squared: bool,
    computing: Computing = nullcontext,
    what: str = "gradients",
) -> list[Tensor]:
    """The mean over rows of the squared gradient, row by row, or of the gradient, batch by batch, in float32.

    F[j] = mean_i (d loss_i / d theta_j)^2, loss_i the mean cross-entropy over the target tokens of row i

    A gradient is added and freed as soon as it is complete, so that at most one tensor's is held at a time.
    """
    totals = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    places = {id(p): total for p, total in zip(params, totals, strict=True)}
    before = [(p, p.requires_grad) for p in model.parameters()]

    def add(p: Tensor) -> None:
        assert p.grad is not None
        gradient, total = p.grad.float(), places[id(p)]
        total.addcmul_(gradient, gradient) if squared else total.add_(gradient)
        p.grad = None

    with borrowed_gradients(model, params), progress() as bars:
        for p, _ in before:
            p.requires_grad_(id(p) in places)  # merged adapters leave a model frozen
        own: list[Any] = list(params)  # torch leaves the next call without types
        hooks = [p.register_post_accumulate_grad_hook(add) for p in own]
        try:
            for batch in bars.track(list(([row] for row in rows) if squared else batched(rows)), description=what):
                with computing():
                    loss = answer_losses(model, batch).sum()
                loss.backward()  # type: ignore[no-untyped-call]
        finally:
            for hook in hooks:
                hook.remove()
            for p, required in before:
                p.requires_grad_(required)
    if not all(bool(torch.isfinite(total.sum())) for total in totals):
        raise FloatingPointError(
            "the gradients are not finite: a model's weights or its loss on a row are not numbers; check "
            "both models with 'cplus evaluate'"
        )
    return [total.div_(len(rows)) for total in totals]


# The order in which weights are undone: a score per weight, two bytes each, and the weights above a threshold.


_NEVER = -(2**15)
"""The code of a weight that did not move; below that of every score."""
_CODES = 2**16
_CHUNK = 2**24


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


def ranked(codes: Iterable[Tensor], *, by_sum: bool = False) -> Callable[[float], tuple[int, int]]:
    """From a share to the lowest code such that at most this share of the weights has it or a higher one, and their
    number; counted exactly and without sorting.

    A share is one of the weights, or with `by_sum`, where all scores are positive, one of the sum of their scores.
    """
    counts = torch.zeros(_CODES, dtype=torch.int64)
    for own in codes:
        for part in torch.split(own.flatten(), _CHUNK):
            counts += torch.bincount(part.int() - _NEVER, minlength=_CODES).cpu()
    counts[0] = 0  # weights that did not move
    # The score of each code from 0 on, in double precision; 0 for a code that no number has.
    values = torch.arange(-_NEVER, dtype=torch.int16).view(torch.bfloat16).double().nan_to_num(0.0, posinf=0.0)
    weighed = counts * torch.cat([torch.zeros_like(values), values]) if by_sum else counts
    above, weight = (own.flip(0).cumsum(0).flip(0) for own in (counts, weighed))

    def at(share: float) -> tuple[int, int]:
        # No score has the last code, which is that of no number, so that even a share of 0 has a threshold.
        index = int((weight[1:] <= share * weight[0]).nonzero()[0]) + 1
        return index + _NEVER, int(above[index])

    return at


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
    """How much of what may be given up is given up; up to 1 a value is within its limit.

    >>> [used_of(value, tuned=1.0, limit=2.0) for value in (0.5, 1.5, 4.0)], used_of(1.1, tuned=1.0, limit=1.0)
    ([-0.5, 0.5, 3.0], inf)
    """
    if value <= limit:
        return min(1.0, (value - tuned) / (limit - tuned)) if limit > tuned else 0.0
    return (value - tuned) / (limit - tuned) if value - tuned > limit - tuned > 0 else math.inf


# The weights of a base and a tuned model, checked to match.


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


# What a repair did.


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
    """The share that the search found, of the weights or of the blame, in a list as earlier records have it."""
    trials: int
    """Evaluations of the new rows."""
    merged: Mapping[str, Any] | None = None
    """Of a merge: the share kept of each block, and the divergence from the base model on the past rows."""

    @property
    def share(self) -> float:
        """The share of the moved weights that was reset."""
        return self.undone / self.moved

    def row(self) -> dict[str, Any]:
        """Plain values."""
        row = {**asdict(self), "share": self.share}
        return row if self.merged is not None else {name: own for name, own in row.items() if name != "merged"}

    def __str__(self) -> str:
        new = "; ".join(f"{own.name} rows {own.tuned:.3f} to {own.repaired:.3f} {own.unit}" for own in self.new)
        past = f"{self.past.tuned:.3f} to {self.past.repaired:.3f} (base {self.past.base:.3f})"
        return f"{100 * self.share:.1f} % of the moved weights undone; {new}; past loss {past}"


def repair_row(repaired: Repaired | str | None) -> dict[str, Any] | None:
    """What a record says of a repair: what it did, or why it was refused; None where none was tried."""
    if isinstance(repaired, str):
        return {"refused": repaired}
    return None if repaired is None else repaired.row()


# Repair a fine-tuned model in memory: from its weights, the base's weights and encoded rows, independent of jobs.


DAMPING = 1e-3
"""The share of a tensor's mean importance of the new rows that is added to each weight's."""
TOWARDS = 0.7
"""Where on the way from base to tuned the importance of the new rows is computed: at the tuned model it vanishes with
the loss."""
HALFWAY = 0.5
"""Where the gradient of the past rows is computed: there, times the change, it gives the rise to second order."""
By = Literal["importance", "blame"]
"""How weights are ranked: by F_past / F_new, or by their part in the rise of the past loss."""
BYTES_PER_PARAMETER = 18
"""Model, base and tuned weights, the sums in float32, and the past importance in bfloat16."""


@torch.no_grad()
def write(params: Sequence[Tensor], values: Iterable[Tensor]) -> None:
    """Set the parameters to these values, exactly."""
    for p, value in zip(params, values, strict=True):
        p.copy_(value)


def undoing(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    base: Sequence[Tensor],
    tuned: Sequence[Tensor],
    past_rows: Sequence[Encoded],
    new_rows: Sequence[Encoded],
    by: By,
    computing: Computing,
) -> Callable[[float], int]:
    """What writes the weights with a share of the changes undone, and returns how many were.

    By importance: the changes with the highest F_past / (F_new + 1e-3 mean(F_new)), where the past rows depend on the
    weights most. By blame: those with the highest gradient of the past loss times the change, which is their part in
    the rise of that loss to first order; weights that did no harm are not undone.
    """

    def means(rows: Sequence[Encoded], which: str, *, squared: bool) -> list[Tensor]:
        what = f"repair: {'importance for' if squared else 'gradient of'} {which} rows"
        return mean_gradients(model, rows, params, squared=squared, computing=computing, what=what)

    def on_the_way(part: float) -> Iterator[Tensor]:
        return (torch.lerp(before.to(after), after, part) for before, after in zip(base, tuned, strict=True))

    deltas = (after - before.to(after) for before, after in zip(base, tuned, strict=True))
    if by == "blame":
        write(params, on_the_way(HALFWAY))
        gradients = iter(means(past_rows, "past", squared=False))  # used up before the search
        scores = (gradient * delta for gradient, delta in zip(gradients, deltas, strict=True))
        codes = [encode(own, own.clamp(min=0.0)) for own in scores]
    else:
        write(params, base)
        past = [own.bfloat16() for own in means(past_rows, "past", squared=True)]
        write(params, on_the_way(TOWARDS))
        codes = []
        for f_past, f_new, delta in zip(past, means(new_rows, "new", squared=True), deltas, strict=True):
            damping = (DAMPING * f_new.mean()).clamp(min=torch.finfo(f_new.dtype).tiny)
            codes.append(encode(f_past.float() / (f_new + damping), delta))
    at = ranked(codes, by_sum=by == "blame")

    def undo(share: float) -> int:
        threshold, count = at(share)
        pairs = zip(base, tuned, codes, strict=True)
        write(params, (torch.where(own >= threshold, before.to(after), after) for before, after, own in pairs))
        return count

    return undo


def repair_model(
    model: nn.Module,
    base_weights: Mapping[str, Tensor],
    past_rows: Sequence[Encoded],
    new_rows: Sequence[Encoded],
    *,
    checks: Sequence[Check] = (),
    by: By = "importance",
    computing: Computing = nullcontext,
    notify: Callable[[str], None] = lambda sentence: None,
) -> Repaired:
    """Reset a tuned model's weights to the base's, in place: those ranked highest, as many as `checks` admit.

    `base_weights` are by the names of `model.named_parameters()`. Without `checks` the loss of the new rows may rise by
    5 % of its fall. `by="blame"` needs no importance: one gradient of the past rows tells which changes raised their
    loss, and only those are undone. An error leaves the tuned weights as they were.
    """
    if not past_rows or not new_rows:
        raise ValueError(f"expected past and new rows to repair with, got {len(past_rows)} and {len(new_rows)}")
    own = dict(model.named_parameters())
    names = moved_weights(base_weights, own)
    params, base = [own[name] for name in names], [base_weights[name].detach() for name in names]
    tuned = [p.detach().clone() for p in params]
    moved = sum(int((before.to(after) != after).sum()) for before, after in zip(base, tuned, strict=True))
    checks, training = checks or (loss_check(new_rows),), model.training

    def value(measure: Callable[[nn.Module], float]) -> float:
        with computing():
            return measure(model)

    def measured() -> list[float]:
        return [value(check.measure) for check in checks]

    def past_loss() -> float:
        return value(lambda model: mean_loss(model, past_rows, what="repair: past loss"))

    def shown(values: Sequence[float]) -> str:
        return ", ".join(f"{c.name} {value:.3f} {c.unit}" for c, value in zip(checks, values, strict=True))

    model.eval()
    try:
        at_tuned, past_tuned = measured(), past_loss()
        write(params, base)
        at_base, past_base = measured(), past_loss()
        for check, before, after in zip(checks, at_base, at_tuned, strict=True):
            if not (check.held_out or after < before):
                raise Unrepairable(
                    f"the tuned model has not learned the {check.name} rows, so there is nothing to keep: {before:.3f} "
                    f"{check.unit} with the base model, {after:.3f} with the tuned one; give the rows it was trained on"
                )
        limits = [check.limit(b, t) for check, b, t in zip(checks, at_base, at_tuned, strict=True)]
        undo = undoing(model, params, base, tuned, past_rows, new_rows, by, computing)
        found: dict[float, list[float]] = {}

        def used(share: float) -> float:
            undone = undo(share)
            found[share] = measured()
            most = max(map(used_of, found[share], at_tuned, limits)) if undone else math.inf
            verdict = "kept" if most <= 1 else "too much"
            notify(f"repair: {100 * undone / moved:.1f} % undone: {shown(found[share])}: {verdict}")
            return most

        smooth = all(check.unit == "nats per token" for check in checks)
        share = largest_share(used, RESOLUTION, smooth=smooth)
        if share == 0:
            raise Unrepairable(
                "no share of the changes can be undone with the new rows still known (allowed: at most "
                f"{shown(limits)}); allow more with a larger tolerance, or use the tuned model as it is"
            )
        undone, past = undo(share), past_loss()
        # A gate may have lowered the past rows' loss below the base's, on the rows it saw.
        if past >= max(past_base, past_tuned):
            raise Unrepairable(
                f"undoing {100 * undone / moved:.1f} % of the changes does not lower the loss of the past rows "
                f"({past_tuned:.3f} nats per token with the tuned model, {past:.3f} after, {past_base:.3f} with the "
                "base): there is nothing to repair"
            )
    except BaseException:
        write(params, tuned)
        raise
    finally:
        model.train(training)
    levels = zip(checks, at_base, at_tuned, found[share], limits, strict=True)
    return Repaired(
        undone=undone,
        moved=moved,
        parameters=sum(p.numel() for p in own.values()),
        new=tuple(
            Levels(name=c.name, unit=c.unit, base=b, tuned=t, repaired=v, limit=limit) for c, b, t, v, limit in levels
        ),
        past=Levels(name="past", unit="nats per token", base=past_base, tuned=past_tuned, repaired=past),
        past_rows=len(past_rows),
        new_rows=len(new_rows),
        shares=(share,),
        trials=len(found),
    )
