"""A small problem with known gradients: new data pulls one way, the past another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from cplus.core.evidence import Reference

SHAPES = ((4, 3), (5,), (2, 3))


class Bag(nn.Module):
    """Parameters without a forward pass."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)) for shape in SHAPES
        )


def targets(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Where a quadratic bowl has its bottom."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in SHAPES]


def new_gradient(theta: Sequence[Tensor], batch: int) -> list[Tensor]:
    """The gradient of one minibatch: a bowl that moves with the batch."""
    return [p - goal for p, goal in zip(theta, targets(100 + batch, theta[0].dtype), strict=True)]


def past_gradient(theta: Sequence[Tensor]) -> list[Tensor]:
    """The preservation gradient: a bowl elsewhere."""
    return [p - goal for p, goal in zip(theta, targets(7, theta[0].dtype), strict=True)]


def copies(params: Iterable[Tensor]) -> list[Tensor]:
    """The values of some parameters as they are now."""
    return [p.detach().clone() for p in params]


def same(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether two lists of tensors are the same bit for bit."""
    return all(torch.equal(p.detach(), q.detach()) for p, q in zip(some, others, strict=True))


def proposing(params: Sequence[Tensor], step: Callable[[int], None]) -> Callable[[list[Tensor], int], list[Tensor]]:
    """What `algorithm.run` asks of an optimizer: where `step` of this batch leads from theta."""

    def propose(theta: list[Tensor], batch: int) -> list[Tensor]:
        for p, value in zip(params, theta, strict=True):
            p.data.copy_(value)
        step(batch)
        return copies(params)

    return propose


class PastEvidence:
    """The preservation gradient as evidence for a guard."""

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        return Reference(vectors=[past_gradient([p.detach().clone() for p in params])])


class ConstantEvidence:
    """The same vector whatever the parameters."""

    def __init__(self, vector: list[Tensor]) -> None:
        self.vector = vector

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        return Reference(vectors=[self.vector])
