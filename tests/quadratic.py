"""A small problem with known gradients: new data pulls one way, the past another."""

from __future__ import annotations

from collections.abc import Sequence

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
