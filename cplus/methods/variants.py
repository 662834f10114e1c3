"""Variants of the evidence, the paper's ablations among them, and projections of the new data's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cplus.base.cost import TRAINING_RESERVE, Work
from cplus.base.environment import free_memory
from cplus.core import gates
from cplus.core.algorithm import collaborates
from cplus.core.engine import Engine, Passes, engine_of
from cplus.core.evidence import Evidence, MeanGradient, Reference, Source, borrowed_gradients, evaluating, taken
from cplus.core.gates import Collaborative, Elementwise, NormMatched, Shuffled
from cplus.core.losses import answer_losses, target_logits
from cplus.core.rows import MAX_TOKENS, Encoded, batched, like_length, measured
from cplus.methods.table import Method

# Variants of the evidence: the paper's ablations, and evidence that remembers earlier refreshes.


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


@dataclass(frozen=True, kw_only=True)
class NormAligned:
    """Ablation: each source's gradient is scaled to the first source's norm before the blend.

    Paper: Sec. 3.2.2 and App. C.4, norm alignment.    g_hat = sum_s w_s * g_s * ||g_1|| / ||g_s||
    """

    model: nn.Module
    sources: tuple[Source, ...]

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """One pass per source, then the scaled sum."""
        alone = [replace(source, weight=1.0) for source in self.sources]
        found = [MeanGradient(model=self.model, sources=(source,))(params, refresh) for source in alone]
        norms = [f.norm or 0.0 for f in found]
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
        worst, work, engine = [], Work(), engine_of(self.model, params)
        for source in self.sources:
            seen = source.at(refresh)
            # All processes compute the same losses up to rounding; the sum makes every process rank them identically.
            losses = engine.sums(example_losses(self.model, seen), params[0].device)
            order = sorted(range(len(seen)), key=losses.__getitem__, reverse=True)
            keep = order[: max(1, round(self.share * len(seen)))]
            worst.append(replace(source, rows=[seen[i] for i in keep], parts=1))
            work += Work(forward=sum(measured(batch).padded for batch in batched(seen, MAX_TOKENS)))
        found = MeanGradient(model=self.model, sources=tuple(worst))(params, refresh)
        return Reference(vectors=found.vectors, losses=found.losses, work=found.work + work, norm=found.norm)


@torch.no_grad()
def example_losses(model: nn.Module, rows: Sequence[Encoded]) -> list[float]:
    """The loss of each row, in the order of the rows, in evaluation mode."""
    losses = [0.0] * len(rows)
    with evaluating(model):
        for batch in like_length(rows, MAX_TOKENS):
            for i, loss in zip(batch, answer_losses(model, [rows[i] for i in batch]).tolist(), strict=True):
                losses[i] = loss
    return losses


# Where the vectors of a projection are kept: on the device, there in half precision, or so in the host's memory.


def free_bytes(device: torch.device) -> int:
    """Free bytes on a device, with what torch holds there unused."""
    if device.type != "cuda":
        return free_memory()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def storage(
    count: int, params: Sequence[Tensor], *, free: Callable[[torch.device], int] = free_bytes
) -> tuple[torch.device, torch.dtype]:
    """Where, and in which precision, `count` vectors of these parameters fit beside the training.

    In half precision they are bfloat16: a unit vector of many coordinates is too small for float16.
    """
    numbers, device, host = sum(p.numel() for p in params), params[0].device, torch.device("cpu")
    room = free(device) - TRAINING_RESERVE * numbers
    places = [(device, params[0].dtype, room / 4), (device, torch.bfloat16, room / 2)]
    if device != host:
        places.append((host, torch.bfloat16, free(host) / 2))
    for where, dtype, fits in places:
        if count * numbers <= fits:
            return where, dtype
    need, names = 2 * count * numbers / 1e9, "its device" if device == host else f"{device} and the host"
    raise ValueError(
        f"this projection keeps {count} gradients: in half precision they need {need:.1f} GB, and beside the training "
        f"{max(0, room) / 1e9:.1f} GB are free on {names}; use fewer anchors or a machine with more memory"
    )


# Projections: transforms of the new-data gradient before the optimizer sees it, tensor by tensor.


BLOCK = 1 << 24
"""Coordinates that are converted at once: a large tensor in double precision would double its memory twice."""


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """The inner product of two gradients held as lists of tensors, in double precision and left on the first's device.

    No part is read, so that the host does not wait.
    """
    return sum(
        (
            (x.double() * y.to(x.device).double()).sum().to(a[0].device)
            for one, other in zip(a, b, strict=True)
            for x, y in zip(torch.split(one.reshape(-1), BLOCK), torch.split(other.reshape(-1), BLOCK), strict=True)
        ),
        torch.zeros((), dtype=torch.float64, device=a[0].device),
    )


def agem(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """A-GEM, in place: if the gradient conflicts with the reference, remove the conflicting component.

    Source: Chaudhry et al. 2019, Eq. 11.    g <- g - (g.r / r.r) r    if g.r < 0
    """
    conflict = dot(gradient, reference)
    subtract(gradient, reference, torch.where(conflict < 0.0, conflict / dot(reference, reference), 0.0))


def ogd(gradient: Sequence[Tensor], basis: Sequence[Sequence[Tensor]]) -> None:
    """OGD, in place: remove the gradient's component along each vector of an orthonormal basis.

    Source: Farajtabar et al. 2020, Algorithm 1.    g <- g - sum_v (g.v) v
    """
    for vector in basis:
        subtract(gradient, vector, dot(gradient, vector))


def agem_step(gradient: Sequence[Tensor], vectors: Sequence[Sequence[Tensor]]) -> None:
    """A-GEM with the one vector of its evidence."""
    agem(gradient, vectors[0])


def masked_step(gradient: Sequence[Tensor], vectors: Sequence[Sequence[Tensor]]) -> None:
    """In place: CPL's mask on the raw gradient, as if the update were -gradient; AdamW then rescales what is left.

    g_i <- 0    where reference_i * (-g_i) > 0
    """
    for g, reference in zip(gradient, vectors[0], strict=True):
        g.mul_(collaborates(reference, -g))


def orthonormal(
    vectors: Iterable[Sequence[Tensor]], device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> list[list[Tensor]]:
    """Modified Gram-Schmidt over gradients, one at a time, kept on this device in this precision.

    A vector is left out if what remains of it may be rounding alone, so that it depends on the earlier ones.
    """
    basis: list[list[Tensor]] = []
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for vector in vectors:
        rest = [v.clone() for v in vector]
        norm = dot(rest, rest) ** 0.5
        for _ in range(2):  # the second pass removes what rounding left behind in the first
            ogd(rest, basis)
        length = dot(rest, rest) ** 0.5
        if bool(length > tolerance * norm):
            basis.append([(v / length.to(v.device)).to(device, dtype) for v in rest])
    return basis


def subtract(gradient: Sequence[Tensor], vector: Sequence[Tensor], scale: Tensor) -> None:
    """In place: g <- g - scale * v."""
    for g, v in zip(gradient, vector, strict=True):
        g.sub_(v.to(g.device, g.dtype) * scale.to(g.device, g.dtype))


@dataclass(frozen=True, kw_only=True)
class LogitBasis:
    """An orthonormal basis of the anchors' ground-truth-logit gradients, for OGD-GTL.

    Source: Farajtabar et al. 2020, Sec. 4.    v_i = grad( mean over target tokens of the logit of the target )
    """

    model: nn.Module
    rows: Sequence[Encoded]
    place: Callable[[int, Sequence[Tensor]], tuple[torch.device, torch.dtype]] = storage
    """Where so many vectors of these parameters are kept."""

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """One backward pass per anchor."""
        where, dtype = self.place(len(self.rows), params)
        engine = engine_of(self.model, params)
        if engine.sharded:
            raise TypeError("OGD needs whole vectors and the parameters are sharded; train with DDP or in one process")
        with borrowed_gradients(self.model, params) as passes:
            gradients = (self._gradient(row, params, engine, passes) for row in self.rows)
            basis = orthonormal(gradients, where, dtype)
        return Reference(vectors=basis, work=sum((measured([row]) for row in self.rows), Work()))

    def _gradient(self, row: Encoded, params: Sequence[nn.Parameter], engine: Engine, passes: Passes) -> list[Tensor]:
        logits, labels = target_logits(self.model, [row])
        inside = labels[0] != -100
        logit = logits[0][inside].gather(1, labels[0][inside].unsqueeze(1)).mean()
        passes.backward(logit / engine.world)
        # Every process has the same vector up to rounding; after the sum it is the same bit for bit.
        return engine.total(taken(engine, params, passes))


def logit_basis(*, model: nn.Module, sources: Sequence[Source]) -> LogitBasis:
    """The basis of all rows of the sources."""
    return LogitBasis(model=model, rows=[row for source in sources for row in source.rows])


# Gates, each built from its row of the table and a seed.


def smoothed(row: Method, seed: int) -> Collaborative:
    """The paper's gate with the row's smoothing, or without any."""
    return Collaborative(beta=row.beta or 0.0, ema=row.ema)


def norm_matched(row: Method, seed: int) -> NormMatched:
    """The control that keeps the norm of CPLUS's update alone."""
    return NormMatched(smoothed(row, seed))


def shuffled(row: Method, seed: int) -> Shuffled:
    """The control that permutes CPLUS's coefficients."""
    return Shuffled(smoothed(row, seed), seed=seed)


def stored(row: Method, seed: int) -> Elementwise:
    """The coefficients that the evidence holds."""
    return Elementwise(gates.stored, uses="coefficients", whole=False)


def shielded(row: Method, seed: int) -> Elementwise:
    """0 in the frozen columns, else 1."""
    return Elementwise(lambda step: (step.sign <= 0).to(torch.float32), uses="signs", whole=False)


def cautious(row: Method, seed: int) -> Elementwise:
    """0 where the update does not descend the new data's gradient."""
    return Elementwise(gates.cautious, uses="nothing", whole=False)


def largest_momenta(row: Method, seed: int, strength: float) -> Elementwise:
    """1 for the share `strength` of each tensor's coordinates with the largest momentum."""
    return Elementwise(lambda step: gates.largest_momenta(step, strength), uses="nothing")
