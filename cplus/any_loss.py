"""Evidence from any loss: batches of anything and a function from the model and a batch to a scalar."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from cplus.evidence import (
    Passes,
    Reference,
    borrowed_gradients,
    check_finite,
    length,
    named,
    refuse_unreached,
)
from cplus.passes import Turn
from cplus.ranks import Layout, layout, local

Item = TypeVar("Item")

LossFunction: TypeAlias = Callable[[nn.Module, Any], Tensor]
Entry: TypeAlias = tuple[float, Iterable[Any], LossFunction]
"""A weight, the batches and the function that gives the loss of one batch."""


@dataclass(frozen=True, kw_only=True)
class LossSource:
    """Batches of past behaviour, their loss and its weight in the blend; every refresh iterates over all batches."""

    name: str
    weight: float
    batches: Iterable[Any]
    loss: LossFunction

    def __post_init__(self) -> None:
        if not 0.0 < self.weight < math.inf:
            raise ValueError(f"the weight of {self.name} must be a positive number, got {self.weight}")
        if not callable(self.loss):
            raise TypeError(f"{self.name} needs a function loss(model, batch), got {type(self.loss).__name__}")
        if not hasattr(self.batches, "__iter__") and not hasattr(self.batches, "__getitem__"):
            raise TypeError(f"{self.name} needs an iterable of batches, got {type(self.batches).__name__}")
        if hasattr(self.batches, "__next__"):
            raise TypeError(
                f"{self.name} has a {type(self.batches).__name__}, which can be read only once, and every refresh "
                "reads all batches; give a list or a DataLoader"
            )

    def at(self, model: nn.Module, batch: Any, number: int) -> Tensor:
        """The loss of one batch; anything but a finite scalar that depends on a trained parameter is refused."""
        loss = self.loss(model, batch)
        where = f"the loss of {self.name}, batch {number},"
        if not isinstance(loss, Tensor):
            raise TypeError(f"{where} must be a scalar tensor, got {type(loss).__name__}; return its loss")
        if loss.ndim:
            raise ValueError(f"{where} must be a scalar, got the shape {tuple(loss.shape)}; return its mean")
        if not loss.requires_grad:
            raise ValueError(
                f"{where} depends on no trained parameter; compute it with the model it is called with, with gradients"
            )
        return loss


def sources(entries: Sequence[Entry]) -> tuple[LossSource, ...]:
    """The entries as named sources: `evidence1`, `evidence2` and so on."""
    found = []
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, tuple | list) or len(entry) != 3:
            raise TypeError(f"evidence {number} must be (weight, batches, loss function), got {entry!r:.80}")
        weight, batches, loss = entry
        found.append(LossSource(name=f"evidence{number}", weight=weight, batches=batches, loss=loss))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class LossGradient:
    """The weighted sum of each source's mean gradient over its batches, each batch with equal weight.

        g_hat = sum_s w_s * mean_{b in s} grad( loss_s(model, b) )

    With several processes the mean is over the batches of all of them, whether they hold the same batches or parts.
    The model is in evaluation mode, and torch's random state is afterwards what it was before.
    """

    model: nn.Module
    sources: tuple[LossSource, ...]

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """One pass over every source at the current parameters."""
        where = layout(params, named(self.model))
        vector: list[Tensor | None] = [None] * len(params)
        losses: dict[str, float] = {}
        with undisturbed(self.model, params, where) as passes:
            for source in self.sources:
                batches, losses[source.name] = self._pass(source, params, where, passes)
                # FSDP2 and ZeRO average gradients over the processes; the mean over all batches needs their sum.
                scale = (where.world if where.sharded else 1) / batches
                for i, (part, held) in enumerate(zip(passes.take(), vector, strict=True)):
                    if part is not None:
                        part.mul_(scale)
                        vector[i] = part.mul_(source.weight) if held is None else held.add_(part, alpha=source.weight)
            self._check_reached(params, passes, where)
        whole = [torch.zeros_like(local(p)) if g is None else g for p, g in zip(params, vector, strict=True)]
        if not where.sharded:
            whole = [where.sum(g) for g in whole]
        check_finite(self.model, params, whole, losses, where)
        return Reference(vectors=[whole], losses=losses, norm=length(whole, where))

    def rehearse(self, params: Sequence[nn.Parameter]) -> None:
        """Refuse what a refresh would refuse: every batch is read, and used until all parameters are reached."""
        where = layout(params, named(self.model))
        with undisturbed(self.model, params, where) as passes:
            for source in self.sources:
                _, loss = self._pass(source, params, where, passes, enough=lambda: not passes.unreached())
                passes.take()
                if not math.isfinite(loss):
                    raise FloatingPointError(f"the loss of {source.name} is {loss}: evidence must be finite")
                again = any(True for _ in source.batches)
                if sum(where.sums([again], params[0].device)) < where.world:
                    raise ValueError(
                        f"{source.name} had no batch when read a second time, and every refresh reads all batches; "
                        "give a list or a DataLoader over a dataset that can be read repeatedly"
                    )
            self._check_reached(params, passes, where)

    def _pass(
        self,
        source: LossSource,
        params: Sequence[nn.Parameter],
        where: Layout,
        passes: Passes,
        enough: Callable[[], bool] = lambda: False,
    ) -> tuple[float, float]:
        """Add up a source's gradients; the number of batches and the mean loss over all processes.

        Once it is `enough`, further batches are only read; never if sharded, where every pass is collective.
        """
        counts = [0.0, 0.0, 0.0]  # batches, batches used, the sum of their losses
        for number, (batch, last) in enumerate(marked(in_step(source, where, params[0].device)), start=1):
            counts[0] += 1
            if number > 1 and not where.sharded and enough():
                continue
            loss = source.at(self.model, batch, number)
            passes.backward(loss, Turn(last=last))
            counts = [counts[0], counts[1] + 1, counts[2] + loss.item()]
        batches, used, total = where.sums(counts, params[0].device)
        if not batches:
            raise ValueError(f"{source.name} has no batch; give at least one, in a list or DataLoader")
        return batches, total / used

    def _check_reached(self, params: Sequence[nn.Parameter], passes: Passes, where: Layout) -> None:
        """Refuse a parameter that no batch of any process reaches."""
        missing = {id(p) for p in passes.unreached()}
        processes = where.sums([id(p) in missing for p in passes.trained], params[0].device)
        unreached = [p for p, count in zip(passes.trained, processes, strict=True) if count == where.world]
        refuse_unreached(self.model, passes.trained, unreached)


def marked(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Each item with whether it is the last one.

    >>> list(marked("ab"))
    [('a', False), ('b', True)]
    """
    rest = iter(items)
    for item in rest:
        for following in rest:
            yield item, False
            item = following
        yield item, True


def in_step(source: LossSource, where: Layout, device: torch.device) -> Iterator[Any]:
    """The batches; if sharded, where every pass is collective, all processes must have the same number of them."""
    if not where.sharded:
        yield from source.batches
        return
    end = object()
    batches = iter(source.batches)
    while True:
        batch = next(batches, end)
        having = where.sums([batch is not end], device)[0]
        if having == 0:
            return
        if having < where.world:
            raise ValueError(
                f"{source.name} has more batches in some of the {where.world} processes than in others, and sharded "
                "parameters need equally many; use a DistributedSampler with drop_last=True, or the same batches"
            )
        yield batch


@contextmanager
def undisturbed(model: nn.Module, params: Sequence[nn.Parameter], where: Layout) -> Iterator[Passes]:
    """Run a user's losses; gradients, modes, buffers and random state are restored, a changed state is refused."""
    buffers = [
        (module, f"{path}.{name}".lstrip("."), name, buffer, None if buffer is None else buffer.clone())
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
    ]
    # Sharding writes parameters itself: it gathers them before each pass.
    versions = {} if where.sharded else {name: (p, p._version) for name, p in model.named_parameters()}
    device = params[0].device
    changed: list[str] = []
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=random_device(device)):
        try:
            with borrowed_gradients(model, params) as passes:
                yield passes
        finally:
            for module, full, name, buffer, copy in buffers:
                if not unchanged(module._buffers.get(name), copy):
                    changed.append(f"the buffer {full!r}")
                    if buffer is not None and copy is not None:
                        with torch.no_grad():
                            buffer.copy_(copy)
                    module._buffers[name] = buffer
    if changed:
        raise ValueError(
            f"the loss of the evidence changes the model's state: {', '.join(changed[:3])}; it is restored. Leave the "
            "model in evaluation mode and write to no buffer inside the loss"
        )
    moved = [name for name, (p, version) in versions.items() if p._version != version]
    if moved:
        raise ValueError(
            f"the loss of the evidence changes the model's state: the parameter {moved[0]!r}; a loss must only read "
            "the parameters. Load the model again"
        )


def random_device(device: torch.device) -> str:
    """The device type whose random state is forked beside the CPU's."""
    return "cuda" if device.type == "cpu" else device.type


def unchanged(now: Tensor | None, before: Tensor | None) -> bool:
    """Whether a buffer has its old values; NaN equals NaN."""
    if now is None or before is None:
        return now is before
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    return bool(((now == before) | ((now != now) & (before != before))).all())
