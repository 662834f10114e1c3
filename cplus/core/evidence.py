"""Evidence: gradients of past behaviour at the current parameters, never used as a training target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from cplus.base.cost import Work
from cplus.core.engine import Engine, Passes, engine_of, keep_gradients, local
from cplus.core.losses import shared_losses
from cplus.core.rows import MAX_TOKENS, Encoded, like_length, measured

Losses = Callable[[nn.Module, Sequence[Encoded]], Tensor]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows of past behaviour and their weight in the blend; with `parts` > 1 each refresh uses the next part."""

    name: str
    weight: float
    rows: Sequence[Encoded]
    parts: int = 1

    def __post_init__(self) -> None:
        if not 0.0 <= self.weight <= 1.0:
            raise ValueError(f"the weight of source {self.name!r} must lie in [0, 1], got {self.weight}")
        if not self.rows:
            raise ValueError(f"source {self.name!r} is empty; give at least one example or omit the source")
        if not 1 <= self.parts <= len(self.rows):
            raise ValueError(f"source {self.name!r} has {len(self.rows)} rows, too few for {self.parts} parts")

    def at(self, refresh: int) -> Sequence[Encoded]:
        """The rows used at the given refresh."""
        return self.rows[refresh % self.parts :: self.parts]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The result of a refresh: one or more vectors in the order of the parameters, and their cost.

    `norm` is the norm of the gradient, None if it was not computed.
    """

    vectors: list[list[Tensor]]
    losses: dict[str, float] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    norm: float | None = None


class Evidence(Protocol):
    """Anything that computes a reference for these parameters at the n-th refresh."""

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """Compute the reference at the parameters' current values."""
        ...


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, then restore each module's own mode: a frozen BatchNorm stays frozen."""
    modes = [(module, module.training) for module in model.modules()]
    keep_gradients(model)
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def recompute(model: nn.Module) -> None:
    """Keep gradient checkpointing on in evaluation mode, where transformers turns it off with each block's own flag.

    What is inside a block stays in evaluation mode, so nothing is dropped; a block that drops values itself is left.
    """
    for module in model.modules():
        blocks = any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
        if blocks and getattr(module, "gradient_checkpointing", False) and not getattr(module, "dropout", 0.0):
            module.training = True


@contextmanager
def borrowed_gradients(model: nn.Module, params: Sequence[nn.Parameter]) -> Iterator[Passes]:
    """Run in evaluation mode with empty gradients, then restore the user's gradients and modes."""
    with evaluating(model), engine_of(model, params).passes(params) as passes:
        recompute(model)
        yield passes


def taken(engine: Engine, params: Sequence[nn.Parameter], passes: Passes) -> list[Tensor]:
    """This process's part of the gradients, taken out of `.grad`; a parameter without evidence is an error."""
    refuse_unreached(engine, passes, passes.unreached())
    return [torch.zeros_like(local(p)) if g is None else g for p, g in zip(params, passes.take(), strict=True)]


def refuse_unreached(engine: Engine, passes: Passes, missing: Sequence[nn.Parameter]) -> None:
    """Refuse protected parameters for which there is no evidence."""
    if missing:
        names = engine.names()
        shown = ", ".join(names.get(id(p), "a parameter outside the model") for p in missing[:3])
        raise ValueError(
            f"{len(missing)} of {len(passes.trained)} protected parameters get no evidence (first: {shown}): the loss "
            "of the evidence does not depend on them; freeze them with requires_grad_(False) or remove them from the "
            "optimizer"
        )


@dataclass(frozen=True, kw_only=True)
class MeanGradient:
    """The weighted sum of each source's mean gradient, accumulated in one buffer.

    Paper: Eq. 1; Algorithm 1, lines 5-6.    g_hat = sum_s w_s * grad( mean_{i in s} loss_i )

    By linearity, one backward pass over the weighted loss gives the blend without holding any source's own gradient.
    The mean is over examples, each of them the mean over its target tokens; it depends neither on the batching nor on
    the number of processes that share the rows.
    """

    model: nn.Module
    sources: tuple[Source, ...]
    losses: Losses = shared_losses
    max_tokens: int = MAX_TOKENS

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """One pass over every source at the current parameters."""
        engine, work = engine_of(self.model, params), Work()
        seen = [(i, row) for i, source in enumerate(self.sources) for row in source.at(refresh)]
        for source in self.sources:
            engine.check_alike(source.at(refresh), source.name, params[0].device)
        batches = list(like_length([row for _, row in seen], self.max_tokens, engine.world))
        weights = [source.weight / len(source.at(refresh)) * engine.averaging for source in self.sources]
        totals = [0.0] * len(self.sources)
        with borrowed_gradients(self.model, params) as passes:
            for items, weight, last in engine.turns(batches):
                rows = [seen[item][1] for item in items]
                losses = self.losses(self.model, rows)
                factors = torch.tensor([weights[seen[item][0]] * weight for item in items], dtype=losses.dtype)
                passes.backward((losses * factors.to(losses.device)).sum(), last)
                if weight:
                    work += measured(rows)
                    for item, loss in zip(items, losses.tolist(), strict=True):
                        totals[seen[item][0]] += loss
            vector = engine.total(taken(engine, params, passes))
        *totals, rows_seen, tokens, padded = engine.sums(
            [*totals, work.rows, work.tokens, work.padded], vector[0].device
        )
        means = {s.name: total / len(s.at(refresh)) for s, total in zip(self.sources, totals, strict=True)}
        norm = checked_norm(engine, params, vector, means)
        work = Work(rows=int(rows_seen), tokens=int(tokens), padded=int(padded))
        return Reference(vectors=[vector], losses=means, work=work, norm=norm)


def memory_of(evidence: Evidence | None) -> Any:
    """What keeps a state of its own from refresh to refresh, inside any wrappers of the evidence; None if nothing."""
    found: object = evidence
    while found is not None and not hasattr(found, "load_state_dict"):
        found = getattr(found, "inner", None)
    return found


def checked_norm(
    engine: Engine, params: Sequence[nn.Parameter], vector: Sequence[Tensor], losses: dict[str, float]
) -> float:
    """The norm of a gradient; evidence that is not finite is refused, in all processes at once.

    It would gate every coordinate at random. The norm tells in one number, and only where it is not finite, be it by
    overflow, is each tensor read.
    """
    bad = [name for name, loss in losses.items() if not math.isfinite(loss)]
    if bad:
        raise FloatingPointError(f"the loss of the {bad[0]} is {losses[bad[0]]}: evidence must be finite")
    device = vector[0].device
    squared = float(torch.stack([n.double() for n in torch._foreach_norm(list(vector))]).square().sum())
    norm = math.sqrt(engine.over_shards(squared, device))
    if math.isfinite(norm):
        return norm
    found = [p for p, g in zip(params, vector, strict=True) if not bool(torch.isfinite(g).all())]
    if any(engine.sums([len(found)], device)):
        name = engine.names().get(id(found[0]), "a parameter") if found else "a parameter held by another process"
        raise FloatingPointError(f"the evidence for {name} is not finite; check the anchors and the precision")
    return norm


# Evidence from any loss: batches of anything and a function from the model and a batch to a scalar.


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
        engine = engine_of(self.model, params)
        vector: list[Tensor | None] = [None] * len(params)
        losses: dict[str, float] = {}
        with undisturbed(engine, params) as passes:
            for source in self.sources:
                batches, losses[source.name] = self._pass(source, engine, passes, refresh)
                scale = engine.averaging / batches
                for i, (part, held) in enumerate(zip(passes.take(), vector, strict=True)):
                    if part is not None:
                        part.mul_(scale)
                        vector[i] = part.mul_(source.weight) if held is None else held.add_(part, alpha=source.weight)
            missing = {id(p) for p in passes.unreached()}
            counts = engine.sums([id(p) in missing for p in passes.trained], params[0].device)
            pairs = zip(passes.trained, counts, strict=True)
            refuse_unreached(engine, passes, [p for p, count in pairs if count == engine.world])
        whole = [torch.zeros_like(local(p)) if g is None else g for p, g in zip(params, vector, strict=True)]
        whole = engine.total(whole)
        return Reference(vectors=[whole], losses=losses, norm=checked_norm(engine, params, whole, losses))

    def _pass(self, source: LossSource, engine: Engine, passes: Passes, refresh: int) -> tuple[float, float]:
        """Add up a source's gradients; the number of batches and the mean loss over all processes."""
        device, batches, total = passes.trained[0].device, list(source.batches), 0.0
        again = bool(batches) and (refresh > 0 or any(True for _ in source.batches))
        count, repeatable = engine.sums([len(batches), again], device)
        if not count or not repeatable:
            when = " when read a second time, and every refresh reads all batches" if count else ""
            raise ValueError(
                f"{source.name} has no batch{when}; give at least one, in a list or a DataLoader over a dataset that "
                "can be read repeatedly"
            )
        if engine.sharded:  # every pass is collective
            engine.check_alike(len(batches), f"numbers of batches of {source.name}", device)
        for number, batch in enumerate(batches, start=1):
            loss = source.at(self.model, batch, number)
            passes.backward(loss, number == len(batches))
            total += loss.item()
        return count, engine.sums([total], device)[0] / count


@contextmanager
def undisturbed(engine: Engine, params: Sequence[nn.Parameter]) -> Iterator[Passes]:
    """Run a user's losses; gradients, modes, buffers and random state are restored, a changed state is refused."""
    model, device = engine.model, params[0].device
    owners = {f"{path}.{name}".lstrip("."): m for path, m in model.named_modules() for name in m._buffers}
    held = {full: m._buffers[full.rpartition(".")[2]] for full, m in owners.items()}
    copies = {full: None if buffer is None else buffer.clone() for full, buffer in held.items()}
    # Sharding writes parameters itself: it gathers them before each pass.
    versions = {} if engine.sharded else {name: (p, p._version) for name, p in model.named_parameters()}
    changed: list[str] = []
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=kind), torch.no_grad():
        try:
            with torch.enable_grad(), borrowed_gradients(model, params) as passes:
                yield passes
        finally:
            for full, copy in copies.items():
                buffers, name, buffer = owners[full]._buffers, full.rpartition(".")[2], held[full]
                if not same(buffers.get(name), copy):
                    changed.append(f"the buffer {full!r}")
                    if buffer is not None and copy is not None:
                        buffer.copy_(copy)
                    buffers[name] = buffer
    changed += [f"the parameter {name!r}" for name, (p, version) in versions.items() if p._version != version]
    if changed:
        raise ValueError(
            f"the loss of the evidence changes the model's state: {', '.join(changed[:3])}; buffers are restored. A "
            "loss must leave the model in evaluation mode and only read its parameters"
        )


def same(now: Tensor | None, before: Tensor | None) -> bool:
    """Whether a buffer has its old values; NaN equals NaN."""
    if now is None or before is None or now.shape != before.shape or now.dtype != before.dtype:
        return now is before
    return torch.allclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)
