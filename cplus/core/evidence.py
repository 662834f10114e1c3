"""Evidence: gradients of past behaviour at the current parameters, never used as a training target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from cplus.base.cost import TRAINING_RESERVE, Work
from cplus.base.environment import free_memory
from cplus.core.algorithm import collaborates
from cplus.core.losses import answer_losses, shared_losses, target_logits
from cplus.core.optim import in_model
from cplus.core.passes import Passing, Turn, passing, turns
from cplus.core.rows import MAX_TOKENS, Encoded, batched, like_length, measured
from cplus.core.shards import Layout, inside, is_engine, is_third, keep_gradients, layout, local, name_of, partitions

# Evidence under DeepSpeed ZeRO: gradients that an engine reduces and partitions exactly like those it steps.


@contextmanager
def running(engine: Any) -> Iterator[ZeroPasses]:
    """Passes between two updates; training gradients that wait in the engine would be mixed with the evidence."""
    zero, passes = engine.optimizer, ZeroPasses(engine)
    waiting = zero._epilogue_ran_this_backward if is_third(zero) else zero.micro_step_id >= 0
    if waiting or zero.micro_step_id > 0:
        raise RuntimeError(
            "the engine holds gradients of an unfinished accumulation; call guard.refresh() after the engine.step() of "
            "the last micro-batch and before the next backward pass"
        )
    boundary = engine._is_gradient_accumulation_boundary
    hooks = [p.register_hook(passes.note(p)) for p in passes.trained]  # type: ignore[no-untyped-call]
    passes.discard()
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()
        passes.discard()
        engine._is_gradient_accumulation_boundary = boundary
        zero.set_gradient_accumulation_boundary(engine.is_gradient_accumulation_boundary())


class ZeroPasses:
    """Backward passes through an engine, whose averaged gradients are taken out instead of being stepped."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.trained: list[nn.Parameter] = [p for p in engine.module.parameters() if p.requires_grad]
        self.reached: set[int] = set()

    def backward(self, loss: Tensor, turn: Turn) -> None:
        """Add a loss's gradient; the last turn ends what the next `take` returns."""
        self.engine.set_gradient_accumulation_boundary(turn.last)
        self.engine.backward(loss, scale_wrt_gas=False)

    def take(self) -> list[Tensor | None]:
        """The gradients since the last call, averaged over the processes, in the layout of the partitions.

        ZeRO's own step puts them there; the torch optimizer's step is replaced for this call, and clipping is off.
        """
        zero = self.engine.optimizer
        inner, found = zero.optimizer, {}

        def note(*_: object, **__: object) -> None:
            for p in (p for group in inner.param_groups for p in group["params"]):
                found[id(p)] = p.grad.detach().clone()

        kept = {name: getattr(zero, name, None) for name in ("clip_grad", "overflow", "_global_grad_norm")}
        linked, step = getattr(zero, "_hp_optimizer_states_linked", None), vars(inner).get("step")
        zero.clip_grad, inner.step = 0.0, note
        if linked is not None:
            zero._hp_optimizer_states_linked = True  # there is no optimizer state before the first step
        try:
            zero.step()
        finally:
            del inner.step
            if step is not None:
                inner.step = step
            for name, value in kept.items():
                setattr(zero, name, value)
            if linked is not None:
                zero._hp_optimizer_states_linked = linked
        self.discard()
        if not found:
            raise FloatingPointError("the evidence is not finite; check the anchors and the precision")
        return [found[id(p)] for p in partitions(self.engine)]

    def unreached(self) -> list[nn.Parameter]:
        """The trained parameters that got no gradient so far."""
        return [p for p in self.trained if id(p) not in self.reached]

    def note(self, p: nn.Parameter) -> Callable[[Tensor], None]:
        """A hook that notes that a parameter got a gradient."""
        return lambda _: self.reached.add(id(p))

    def discard(self) -> None:
        """Empty the engine's gradient buffers; ZeRO 3 would reuse the old gradient of a parameter without a new one."""
        zero = self.engine.optimizer
        zero.zero_grad(set_to_none=True)
        if is_third(zero):
            zero.grad_partitions_flat_buffer.zero_()
            return
        for held in (zero.averaged_gradients, zero.all_grad_tensors):
            held.update(dict.fromkeys(held))
        zero.micro_step_id = -1


# Where the vectors of a projection are kept: on the device, there in half precision, or so in the host's memory.


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The device and the precision of stored vectors."""

    device: torch.device
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        """The share of a vector's length that may be rounding left over from others, so that it depends on them."""
        return 1e-6 if self.dtype == torch.float32 else 1e-2

    def stored(self, vector: Sequence[Tensor]) -> list[Tensor]:
        """The vector as it is kept; itself where nothing changes."""
        return [v.to(self.device, self.dtype) for v in vector]


def free_bytes(device: torch.device) -> int:
    """Free bytes on a device, with what torch holds there unused."""
    if device.type != "cuda":
        return free_memory()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def storage(
    count: int,
    params: Sequence[Tensor],
    *,
    there: int = 0,
    free: Callable[[torch.device], int] = free_bytes,
) -> Storage:
    """Where `count` vectors of these parameters fit; `there` bytes of them are already on the device.

    In half precision they are bfloat16: a unit vector of many coordinates is too small for float16.
    """
    numbers, device, host = sum(p.numel() for p in params), params[0].device, torch.device("cpu")
    room = free(device) + there - TRAINING_RESERVE * numbers
    for dtype, each in ((torch.float32, 4), (torch.bfloat16, 2)):
        if count * numbers * each <= room:
            return Storage(device=device, dtype=params[0].dtype if dtype is torch.float32 else dtype)
    if device != host and 2 * count * numbers <= free(host):
        return Storage(device=host, dtype=torch.bfloat16)
    need, names = 2 * count * numbers / 1e9, "its device" if device == host else f"{device} and the host"
    raise ValueError(
        f"this projection keeps {count} gradients: in half precision they need {need:.1f} GB, and beside the training "
        f"{max(0, room) / 1e9:.1f} GB are free on {names}; use fewer anchors or a machine with more memory"
    )


# Projections: transforms of the new-data gradient before the optimizer sees it, tensor by tensor.


BLOCK = 1 << 24
"""Coordinates that are converted at once: a large tensor in double precision would double its memory twice."""


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The inner product of two gradients held as lists of tensors, summed in double precision on the first's device."""
    return sum(
        float((x.double() * y.to(x.device).double()).sum())
        for one, other in zip(a, b, strict=True)
        for x, y in _blocks(one, other)
    )


def _blocks(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if one.numel() <= BLOCK:
        yield one, other
        return
    yield from zip(torch.split(one.reshape(-1), BLOCK), torch.split(other.reshape(-1), BLOCK), strict=True)


def agem(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """A-GEM, in place: if the gradient conflicts with the reference, remove the conflicting component.

    Source: Chaudhry et al. 2019, Eq. 11.    g <- g - (g.r / r.r) r    if g.r < 0
    """
    conflict = dot(gradient, reference)
    if conflict < 0.0:
        subtract(gradient, reference, conflict / dot(reference, reference))


def ogd(gradient: Sequence[Tensor], basis: Sequence[Sequence[Tensor]]) -> None:
    """OGD, in place: remove the gradient's component along each vector of an orthonormal basis.

    Source: Farajtabar et al. 2020, Algorithm 1.    g <- g - sum_v (g.v) v
    """
    for vector in basis:
        subtract(gradient, vector, dot(gradient, vector))


def collaborative_gradient(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """In place: CPL's mask on the raw gradient, as if the update were -gradient; AdamW then rescales what is left.

    g_i <- 0    where reference_i * (-g_i) > 0
    """
    for g, r in zip(gradient, reference, strict=True):
        g.mul_(collaborates(r, -g))


def orthonormal(
    vectors: Iterable[Sequence[Tensor]],
    *,
    tolerance: float = 1e-6,
    stored: Callable[[Sequence[Tensor]], list[Tensor]] = list,
) -> list[list[Tensor]]:
    """Modified Gram-Schmidt over gradients, one at a time; a vector that depends on the earlier ones is left out.

    `stored` moves a finished vector to where it is kept.
    """
    basis: list[list[Tensor]] = []
    for vector in vectors:
        rest = [v.clone() for v in vector]
        norm = dot(rest, rest) ** 0.5
        for _ in range(2):  # the second pass removes what rounding left behind in the first
            ogd(rest, basis)
        length = dot(rest, rest) ** 0.5
        if length > tolerance * norm:
            basis.append(stored([v / length for v in rest]))
    return basis


def subtract(gradient: Sequence[Tensor], vector: Sequence[Tensor], scale: float) -> None:
    """In place: g <- g - scale * v."""
    for g, v in zip(gradient, vector, strict=True):
        g.sub_(v.to(g.device, g.dtype), alpha=scale)


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


class Passes(Protocol):
    """Backward passes over the evidence, and the gradients they leave."""

    @property
    def trained(self) -> Sequence[nn.Parameter]:
        """The parameters that should get a gradient."""
        ...

    def backward(self, loss: Tensor, turn: Turn) -> None:
        """Add the gradient of a turn's loss; the last turn is the one before `take`."""
        ...

    def take(self) -> list[Tensor | None]:
        """Take out this process's part of the gradients since the last call, None where there is none."""
        ...

    def unreached(self) -> list[nn.Parameter]:
        """The parameters that got no gradient so far."""
        ...


class PlainPasses:
    """Passes whose gradients torch accumulates in `.grad`."""

    def __init__(self, params: Sequence[nn.Parameter], made: Passing | None = None) -> None:
        self.trained = [in_model(p) for p in params]
        self._passing = made or Passing()
        self._halves = {id(in_model(p)) for p in params if in_model(p) is not p}
        self.reached: set[int] = set()

    def _precise(self, p: nn.Parameter, gradient: Tensor) -> Tensor:
        return gradient.float() if id(p) in self._halves else gradient

    def backward(self, loss: Tensor, turn: Turn) -> None:
        """Add to `.grad`."""
        self._passing.backward(loss, turn, self.trained)

    def take(self) -> list[Tensor | None]:
        """The part of each `.grad` that this process holds; the fields are emptied."""
        self.reached |= {id(p) for p in self.trained if p.grad is not None}
        gradients = [None if p.grad is None else self._precise(p, local(p.grad)) for p in self.trained]
        for p in self.trained:
            p.grad = None
        return gradients

    def unreached(self) -> list[nn.Parameter]:
        """The parameters whose `.grad` was empty."""
        return [p for p in self.trained if p.grad is None and id(p) not in self.reached]


@contextmanager
def borrowed_gradients(model: nn.Module, params: Sequence[nn.Parameter]) -> Iterator[Passes]:
    """Run in evaluation mode with empty gradients, then restore the user's gradients and modes."""
    if is_engine(model):
        with evaluating(model), running(model) as passes:
            yield passes
        return
    held = [in_model(p) for p in params]
    kept = [p.grad for p in held]
    for p in held:
        p.grad = None
    try:
        with evaluating(model):
            recompute(model)
            yield PlainPasses(params, passing(model))
    finally:
        for p, grad in zip(held, kept, strict=True):
            p.grad = grad


def take_gradients(model: nn.Module, params: Sequence[nn.Parameter], passes: Passes | None = None) -> list[Tensor]:
    """Take this process's part of the gradients out of `.grad`; a parameter without evidence is an error."""
    passes = passes or PlainPasses(params)
    refuse_unreached(model, passes.trained, passes.unreached())
    gradients = passes.take()
    return [torch.zeros_like(local(p)) if g is None else g for p, g in zip(params, gradients, strict=True)]


def refuse_unreached(model: nn.Module, params: Sequence[nn.Parameter], missing: Sequence[nn.Parameter]) -> None:
    """Refuse protected parameters for which there is no evidence."""
    if missing:
        names = named(model)
        shown = ", ".join(names.get(id(p), "a parameter outside the model") for p in missing[:3])
        raise ValueError(
            f"{len(missing)} of {len(params)} protected parameters get no evidence (first: {shown}): the loss of the "
            "evidence does not depend on them; freeze them with requires_grad_(False) or remove them from the optimizer"
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
        where = layout(params, named(self.model))
        made, work = passing(self.model), Work()
        seen = [(i, row) for i, source in enumerate(self.sources) for row in source.at(refresh)]
        batches = list(like_length([row for _, row in seen], self.max_tokens, made.parts or where.world))
        found = [0.0] * len(seen)
        for source in self.sources:
            where.check_alike(source.at(refresh), source.name, params[0].device)
        scale = made.scale(where)
        weights = [source.weight / len(source.at(refresh)) * scale for source in self.sources]
        with borrowed_gradients(self.model, params) as passes:
            for turn in turns(batches, where):
                rows = [seen[item][1] for item in turn.items]
                losses = self.losses(self.model, rows)
                factors = losses.new_tensor([weights[seen[item][0]] * turn.weight for item in turn.items])
                passes.backward((losses * factors).sum(), turn)
                for item, loss in zip(turn.items, losses.tolist(), strict=True):
                    found[item] += loss * turn.weight
                work += measured(rows) if turn.weight else Work()
            vector = take_gradients(self.model, params, passes)
        if not where.sharded and not made.copies:
            vector = [where.sum(g) for g in vector]
        counted = where.sums([work.rows, work.tokens, work.padded, *found], vector[0].device)
        found = counted[3:]
        totals = [0.0] * len(self.sources)
        for item in (item for batch in batches for item in batch):
            totals[seen[item][0]] += found[item]
        means = {s.name: total / len(s.at(refresh)) for s, total in zip(self.sources, totals, strict=True)}
        check_finite(self.model, params, vector, means, where)
        work = Work(rows=int(counted[0]), tokens=int(counted[1]), padded=int(counted[2]))
        return Reference(vectors=[vector], losses=means, work=work, norm=length(vector, where))


class Remembered:
    """Variant: a bias-corrected moving average of the evidence over refreshes.

    With one part of the bank per refresh, earlier parts still influence the mask.
    """

    def __init__(self, inner: Evidence, memory: float) -> None:
        if not 0.0 <= memory < 1.0:
            raise ValueError(f"memory must lie in [0, 1), got {memory}")
        self.inner, self.memory = inner, memory
        self.vectors: list[list[Tensor]] = []
        self.weight = 0.0

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """The current inner evidence, averaged with the earlier evidence."""
        found = self.inner(params, refresh)
        self.weight = self.memory * self.weight + (1.0 - self.memory)
        share = (1.0 - self.memory) / self.weight  # 1 at the first refresh
        old = self.vectors or found.vectors
        self.vectors = [
            [a.lerp(b, share) for a, b in zip(before, now, strict=True)]
            for before, now in zip(old, found.vectors, strict=True)
        ]
        return Reference(vectors=self.vectors, losses=found.losses, work=found.work)

    @property
    def nbytes(self) -> int:
        """The average, held in full between refreshes: signs alone could not be averaged further."""
        return sum(g.nbytes for vector in self.vectors for g in vector)

    def state_dict(self) -> dict[str, Any]:
        """The average and its weight."""
        return {"weight": self.weight, "vectors": [[g.clone() for g in vector] for vector in self.vectors]}

    def load_state_dict(self, state: dict[str, Any], params: Sequence[Tensor]) -> None:
        """Restore a saved average on the devices of the parameters."""
        self.weight = float(state["weight"])
        self.vectors = [
            [g.to(p.device, copy=True) for g, p in zip(vector, params, strict=True)] for vector in state["vectors"]
        ]


def memory_of(evidence: Evidence | None) -> Remembered | None:
    """The `Remembered` inside any wrappers of the evidence; None if there is none."""
    found: object = evidence
    while found is not None and not isinstance(found, Remembered):
        found = getattr(found, "inner", None)
    return found


@dataclass(frozen=True, kw_only=True)
class NormAligned:
    """Ablation: each source's gradient is scaled to the first source's norm before the blend.

    Paper: Sec. 3.2.2 and App. C.4, norm alignment.    g_hat = sum_s w_s * g_s * ||g_1|| / ||g_s||
    """

    model: nn.Module
    sources: tuple[Source, ...]

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """One pass per source, then the scaled sum."""
        parts = [
            MeanGradient(model=self.model, sources=(Source(name=s.name, weight=1.0, rows=s.rows, parts=s.parts),))
            for s in self.sources
        ]
        found = [part(params, refresh) for part in parts]
        norms = [norm(f.vectors[0], layout(params, named(self.model))) for f in found]
        scales = [s.weight * (norms[0] / n if n else 0.0) for s, n in zip(self.sources, norms, strict=True)]
        vector = [
            sum((scale * g for scale, g in zip(scales, gs, strict=True)), torch.zeros_like(gs[0]))
            for gs in zip(*(f.vectors[0] for f in found), strict=True)
        ]
        losses = {name: loss for f in found for name, loss in f.losses.items()}
        return Reference(vectors=[vector], losses=losses, work=sum((f.work for f in found), Work()))


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Ablation: each source's mean covers only its worst share of examples.

    Paper: App. E.2, CVaR reduction.    g_s = grad( mean of the `share` largest losses of s )
    """

    model: nn.Module
    sources: tuple[Source, ...]
    share: float = 0.25

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """A forward pass ranks the examples; a second pass computes the gradient of the worst ones."""
        worst, work, where = [], Work(), layout(params, named(self.model))
        for source in self.sources:
            seen = source.at(refresh)
            # All processes compute the same losses up to rounding; the sum makes every process rank them identically.
            losses = where.sums(example_losses(self.model, seen), params[0].device)
            order = sorted(range(len(seen)), key=losses.__getitem__, reverse=True)
            keep = order[: max(1, round(self.share * len(seen)))]
            worst.append(Source(name=source.name, weight=source.weight, rows=[seen[i] for i in keep]))
            work += Work(forward=sum(measured(batch).padded for batch in batched(seen, MAX_TOKENS)))
        found = MeanGradient(model=self.model, sources=tuple(worst))(params, refresh)
        return Reference(vectors=found.vectors, losses=found.losses, work=found.work + work, norm=found.norm)


@dataclass(frozen=True, kw_only=True)
class LogitBasis:
    """An orthonormal basis of the anchors' ground-truth-logit gradients, for OGD-GTL.

    Source: Farajtabar et al. 2020, Sec. 4.    v_i = grad( mean over target tokens of the logit of the target )
    """

    model: nn.Module
    rows: Sequence[Encoded]
    place: Callable[[int, Sequence[Tensor]], Storage] = storage
    """Where so many vectors of these parameters are kept."""

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """One backward pass per anchor."""
        kept = self.place(len(self.rows), params)
        where = layout(params, named(self.model))
        if where.sharded:
            raise TypeError("OGD needs whole vectors and the parameters are sharded; train with DDP or in one process")
        with borrowed_gradients(self.model, params):
            gradients = (self._gradient(row, params, where) for row in self.rows)
            basis = orthonormal(gradients, tolerance=kept.tolerance, stored=kept.stored)
        return Reference(vectors=basis, work=sum((measured([row]) for row in self.rows), Work()))

    def _gradient(self, row: Encoded, params: Sequence[nn.Parameter], where: Layout) -> list[Tensor]:
        logits, labels = target_logits(self.model, [row])
        inside = labels[0] != -100
        logit = logits[0][inside].gather(1, labels[0][inside].unsqueeze(1)).mean()
        (logit / where.world).backward()  # type: ignore[no-untyped-call]
        # Every process has the same vector up to rounding; after the sum it is the same bit for bit.
        return [where.sum(g) for g in take_gradients(self.model, params)]


@torch.no_grad()
def example_losses(model: nn.Module, rows: Sequence[Encoded]) -> list[float]:
    """The loss of each row, in the order of the rows, in evaluation mode."""
    losses = [0.0] * len(rows)
    with evaluating(model):
        for batch in like_length(rows, MAX_TOKENS):
            for i, loss in zip(batch, answer_losses(model, [rows[i] for i in batch]).tolist(), strict=True):
                losses[i] = loss
    return losses


def norm(vector: Sequence[Tensor], where: Layout) -> float:
    """The norm of a gradient, which may be sharded over processes."""
    squared = dot(vector, vector)
    return math.sqrt(where.sums([squared], vector[0].device)[0] if where.sharded else squared)


def length(vector: Sequence[Tensor], where: Layout) -> float:
    """The norm in the gradient's own precision and without a copy: accurate enough to tell it from zero."""
    squared = float(torch.stack([n.double() for n in torch._foreach_norm(list(vector))]).square().sum())
    return math.sqrt(where.sums([squared], vector[0].device)[0] if where.sharded else squared)


def named(model: nn.Module) -> dict[int, str]:
    """The name of each parameter by its identity; those of an engine's partitions, too."""
    names = {id(p): name for name, p in inside(model).named_parameters()}
    if is_engine(model):
        names |= {id(p): name_of(i) for i, p in enumerate(partitions(model))}
    return names


def check_finite(
    model: nn.Module, params: Sequence[nn.Parameter], vector: Sequence[Tensor], losses: dict[str, float], where: Layout
) -> None:
    """Refuse non-finite evidence, in all processes at once: it would gate every coordinate at random."""
    bad = [name for name, loss in losses.items() if not torch.isfinite(torch.tensor(loss))]
    if bad:
        raise FloatingPointError(f"the loss of the {bad[0]} is {losses[bad[0]]}: evidence must be finite")
    found = [p for p, g in zip(params, vector, strict=True) if not bool(torch.isfinite(g).all())]
    if any(where.sums([len(found)], vector[0].device)):
        name = named(model).get(id(found[0]), "a parameter") if found else "a parameter held by another process"
        raise FloatingPointError(f"the evidence for {name} is not finite; check the anchors and the precision")


# Evidence from any loss: batches of anything and a function from the model and a batch to a scalar.


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
