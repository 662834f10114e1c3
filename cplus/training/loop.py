"""The training loop as a generator of events, and the learning-rate schedule."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from cplus.base.cost import Work
from cplus.core.evidence import Evidence, Reference
from cplus.core.guard import Guard
from cplus.core.rows import Encoded, batched, measured
from cplus.distributed import processes
from cplus.methods.after import Outcome, base_weights
from cplus.methods.objectives import Backward, averaged, check_finite
from cplus.methods.repair import Computing
from cplus.methods.table import ANSWERS, Material, Method
from cplus.training.settings import WARMUP_SHARE, StudySettings, TrainSettings

# The training loop: a generator of events, which observers can read but which cannot change the training.


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The number of epochs, the batch size and the order of the new data."""

    epochs: int
    batch_size: int = 1
    order: Literal["file", "shuffled"] = "file"
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise ValueError(f"expected at least 1 epoch and 1 row per batch, got {self.epochs} and {self.batch_size}")


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """The evidence was refreshed; `work` counts recurring passes only, `once` those of evidence computed once.

    Paper: App. E.12, one-time preparation is excluded.
    """

    epoch: int
    step: int
    losses: dict[str, float]
    work: Work
    once: Work = field(default_factory=Work)
    norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """One update was applied; `batch` counts within the epoch, `step` over all epochs, both from 1."""

    epoch: int
    batch: int
    step: int
    loss: float
    work: Work


@dataclass(frozen=True, kw_only=True)
class EpochEnded:
    """Every batch of the epoch has been used."""

    epoch: int
    step: int


Event: TypeAlias = Refreshed | Stepped | EpochEnded


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The position of a run: the epoch, the number of its batches already used, and the total number of steps."""

    epoch: int = 1
    batch: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A method bound to a model, an optimizer and its material, before the first or the first resumed step."""

    method: Method
    material: Material
    backward: Backward
    guard: Guard | None
    base: Mapping[str, Tensor] | None = None
    """The base model's trained weights, for a method that changes them once more after training."""
    computing: Computing = nullcontext
    """Opens the context of each pass."""
    once: Work = field(default_factory=Work)
    """What the objective read of its rows before training."""

    def finish(self, model: nn.Module) -> Outcome:
        """Apply what the method does after training, once, to the trained model with its adapters merged."""
        if self.method.after is None:
            return Work(), None
        assert self.base is not None
        return self.method.after(model.eval(), self.base, self.material, self.computing)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _InContext:
    """Evidence, each refresh of which opens the context anew: autocast remembers weights that have changed since."""

    inner: Evidence
    computing: Computing

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        with self.computing():
            return self.inner(params, refresh)


def prepare(
    method: Method,
    optimizer: Optimizer,
    model: nn.Module,
    material: Material,
    *,
    seed: int,
    computing: Computing = nullcontext,
) -> Prepared:
    """Check the material, copy what the objective needs from the base model, attach the guard to the optimizer.

    Call it while the model is still the base model, before a checkpoint is loaded. Objective and evidence compute in
    the context; weights, optimizer and gate stay as they are.
    """
    method.check(material)
    base = None if method.after is None else base_weights(model)
    with computing():
        objective = method.objective(model, material)
    if processes.size() > 1 and method.objective != ANSWERS:
        objective = averaged(objective, model)

    def backward(rows: Sequence[Encoded]) -> tuple[float, Work]:
        with computing():
            return objective(rows)  # type: ignore[no-any-return]

    guard = None
    if method.guarded:
        found = method.build_evidence(model, material)
        evidence = None if found is None else _InContext(found, computing)
        gate = method.build_gate(seed)
        guard = Guard(optimizer, model, evidence=evidence, gate=gate, projection=method.projection)
    read = (part for kind in method.objective.read_once for part in batched(material.rows(kind)))
    return Prepared(
        method=method,
        material=material,
        backward=backward,
        guard=guard,
        base=base,
        computing=computing,
        once=Work(forward=sum(measured(part).padded for part in read)),
    )


def adapt(
    model: nn.Module,
    optimizer: Optimizer,
    prepared: Prepared,
    *,
    schedule: Schedule,
    seed: int,
    scheduler: LRScheduler | None = None,
    start: Cursor | None = None,
) -> Iterator[Event]:
    """Train and yield each event after it happened; closing the generator stops between two steps."""
    cursor, method, guard = start or Cursor(), prepared.method, prepared.guard
    params = [p for group in optimizer.param_groups for p in group["params"]]
    step = cursor.step
    model.train()
    for epoch in range(cursor.epoch, schedule.epochs + 1):
        batches = epoch_batches(method, prepared.material, schedule, seed=seed, epoch=epoch)
        used = cursor.batch if epoch == cursor.epoch else 0
        for number, rows in enumerate(batches[used:], start=used + 1):
            if guard is not None and due(method, step=step, batch=number):
                found = guard.refresh()
                work, once = (Work(), found.work) if method.refresh == "once" else (found.work, Work())
                yield Refreshed(epoch=epoch, step=step, losses=found.losses, work=work, once=once, norm=found.norm)
            optimizer.zero_grad(set_to_none=True)
            loss, work = prepared.backward(rows)
            check_finite(loss, step + 1)
            if schedule.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(params, schedule.clip_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            step += 1
            yield Stepped(epoch=epoch, batch=number, step=step, loss=loss, work=work)
        yield EpochEnded(epoch=epoch, step=step)
    optimizer.zero_grad(set_to_none=True)


def due(method: Method, *, step: int, batch: int) -> bool:
    """Whether the evidence is refreshed before this batch; never for a method without evidence."""
    if not method.evidence:
        return False
    if method.refresh == "once":
        return step == 0
    if method.refresh == "epoch":
        return batch == 1
    return step % method.refresh == 0


def epoch_batches(
    method: Method, material: Material, schedule: Schedule, *, seed: int, epoch: int
) -> list[list[Encoded]]:
    """One epoch's batches, a pure function of the seed and the epoch.

    Every method makes as many updates as SFT: the union of new and replayed rows, shuffled once per epoch, is split
    into that many batches. Anchors are repeated to the number of probes or, without probes, of new rows. With a `share`
    the batches are SFT's, each followed by kept rows: the bank in turn, over all epochs, each time in another order.

    Paper: App. C.3, anchors are repeated to balance their sampling weight against the probes.
    """
    shuffle = random.Random(f"{seed}/{epoch}").shuffle
    rows = material.rows("new")
    updates = math.ceil(len(rows) / schedule.batch_size)
    if method.train_on == ("new",) or method.share:
        if schedule.order == "shuffled":
            shuffle(rows)
        batches = [rows[i * schedule.batch_size : (i + 1) * schedule.batch_size] for i in range(updates)]
        if not method.share:
            return batches
        kept = [row for kind in method.train_on[1:] for row in material.rows(kind)]
        counts = [math.ceil(method.share * len(batch)) for batch in batches]
        first, drawn = (epoch - 1) * sum(counts), []
        for turn in range(first // len(kept), (first + sum(counts)) // len(kept) + 1):
            drawn += _shuffled(kept, f"{seed}/{turn}/kept")
        rest = iter(drawn[first % len(kept) :])
        return [[*batch, *itertools.islice(rest, count)] for batch, count in zip(batches, counts, strict=True)]
    weight = len(material.rows("probes" if "probes" in method.train_on else "new"))
    for kind in method.train_on[1:]:
        if kind == "anchors":  # the epoch decides which of them are used once more than the others
            order = _shuffled(material.rows(kind), f"{seed}/{epoch}/repeat")
            rows += [order[i % len(order)] for i in range(weight)]
        else:
            rows += material.rows(kind)
    shuffle(rows)
    cuts = [len(rows) * i // updates for i in range(updates + 1)]
    return [rows[a:b] for a, b in itertools.pairwise(cuts)]


def _shuffled(rows: Sequence[Encoded], seed: str) -> list[Encoded]:
    order = list(rows)
    random.Random(seed).shuffle(order)
    return order


# The learning-rate schedule, and the number of updates it covers.


def build_scheduler(settings: TrainSettings, optimizer: Optimizer, num_new: int) -> LambdaLR:
    """The learning-rate schedule over all epochs, whether or not training stops early."""
    total = settings.epochs * updates_per_epoch(num_new, settings.batch_size)
    share = settings.warmup if isinstance(settings, StudySettings) else WARMUP_SHARE
    warmup = round(share * total) if settings.warmup_steps is None else settings.warmup_steps
    return LambdaLR(optimizer, lambda step: rate_factor(step, total=total, warmup=warmup, kind=settings.lr_schedule))


def build_schedule(settings: TrainSettings) -> Schedule:
    """How the rows are batched."""
    clip_norm = settings.clip_norm or None
    return Schedule(epochs=settings.epochs, batch_size=settings.batch_size, order=settings.order, clip_norm=clip_norm)


def rate_factor(step: int, *, total: int, warmup: int, kind: str) -> float:
    """The factor on the learning rate for the update after `step` others; it is above 0 from the first update on.

    >>> [rate_factor(s, total=4, warmup=2, kind="linear") for s in range(4)]
    [0.3333333333333333, 0.6666666666666666, 1.0, 0.5]
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total - warmup)
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}[kind]


def updates_per_epoch(num_new: int, batch_size: int) -> int:
    """The number of updates in an epoch.

    >>> updates_per_epoch(10, 4)
    3
    """
    return math.ceil(num_new / batch_size)
