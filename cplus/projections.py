"""Projections: transforms of the new-data gradient before the optimizer sees it, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from cplus.algorithm import collaborates

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
