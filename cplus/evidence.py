"""Evidence: gradients of past behaviour at the current parameters, never used as a training target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cplus.cost import Work
from cplus.data.batching import MAX_TOKENS, batched, like_length, measured
from cplus.data.encoded import Encoded
from cplus.losses import answer_losses, shared_losses, target_logits
from cplus.masters import in_model
from cplus.offload import Storage, storage
from cplus.passes import Passing, Turn, passing, turns
from cplus.projections import dot, orthonormal
from cplus.ranks import Layout, layout, local
from cplus.support import keep_gradients
from cplus.zero import inside, is_engine, name_of, partitions
from cplus.zero_passes import running

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
