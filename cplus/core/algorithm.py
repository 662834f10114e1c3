"""CPLUS: Algorithm 1 of the paper, as pure functions in the order of its lines, and the plain loop.

Everything faster in this package is tested against `run`. One sign convention holds everywhere:
delta is what the optimizer wants to ADD to theta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Batch = TypeVar("Batch")
Gradient = Callable[[list[Tensor]], list[Tensor]]


def blend(g_anchor: Tensor, g_probe: Tensor, anchor_weight: float) -> Tensor:
    """The preservation gradient: a raw blend, without rescaling either source.

    Paper: Eq. 2; Algorithm 1, line 7.    g_hat = w * g_anchor + (1 - w) * g_probe

    >>> blend(torch.tensor([4.0]), torch.tensor([-2.0]), 0.5)
    tensor([1.])
    """
    if not 0.0 <= anchor_weight <= 1.0:
        raise ValueError(f"anchor_weight must lie in [0, 1], got {anchor_weight}")
    return anchor_weight * g_anchor + (1.0 - anchor_weight) * g_probe


def collaborates(g_hat: Tensor, delta: Tensor) -> Tensor:
    """The binary mask: 1 where the proposal is not predicted to raise the preservation loss, else 0.

    Paper: Eq. 3; Algorithm 1, line 10.    mask = [g_hat * delta <= 0]

    The signs are multiplied, not the values: a product of two small numbers underflows to 0 and would
    count as collaborative.

    >>> collaborates(torch.tensor([1.0, 1.0, 0.0, 1e-30]), torch.tensor([-2.0, 2.0, 5.0, 1e-30]))
    tensor([1., 0., 1., 0.])
    """
    return (g_hat.sign() * delta.sign() <= 0).to(torch.float32)


def zeros(theta: Tensor) -> Tensor:
    """The moving average before the first step, e_0 = 0, in float32 or in the parameter's precision if finer."""
    return torch.zeros_like(theta, dtype=torch.promote_types(theta.dtype, torch.float32))


def smooth(ema: Tensor, mask: Tensor, beta: float) -> Tensor:
    """One step of the mask's moving average.

    Paper: Eq. 4; Eq. 6; Algorithm 1, line 11.    ema = beta * ema + (1 - beta) * mask
    """
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta must lie in [0, 1), got {beta}")
    return beta * ema + (1.0 - beta) * mask.to(ema.dtype)


def coefficient(ema: Tensor, beta: float, t: int) -> Tensor:
    """The bias-corrected average: the share of each coordinate of the proposal that is applied.

    Paper: Eq. 7; Algorithm 1, line 12.    coefficient = clip(ema / (1 - beta**t), 0, 1)

    >>> coefficient(torch.tensor([0.1, 0.05]), 0.9, 1)
    tensor([1.0000, 0.5000])
    """
    return (ema / (1.0 - beta**t)).clamp(0.0, 1.0)


def apply(theta: Tensor, proposed: Tensor, c: Tensor) -> Tensor:
    """The parameters after the step: exactly theta where c = 0, exactly the proposal where c = 1.

    Paper: Eq. 5; Algorithm 1, line 13.    theta = theta + c * (proposed - theta)
    """
    return torch.lerp(theta, proposed, c.to(theta.dtype))


def run(
    theta: Sequence[Tensor],
    *,
    epochs: Iterable[Iterable[Batch]],
    propose: Callable[[list[Tensor], Batch], list[Tensor]],
    anchor_gradient: Gradient,
    probe_gradient: Gradient,
    anchor_weight: float = 0.5,
    beta: float = 0.9,
) -> list[Tensor]:
    """The plain loop; `propose` is OPT with its own state and returns theta + delta for one minibatch.

    Paper: Algorithm 1, lines 2-4, 8, 14-17.
    """
    theta = [p.clone() for p in theta]
    ema = [zeros(p) for p in theta]
    t = 1
    for batches in epochs:
        pairs = zip(anchor_gradient(theta), probe_gradient(theta), strict=True)
        g_hat = [blend(g_anchor, g_probe, anchor_weight) for g_anchor, g_probe in pairs]
        for batch in batches:
            proposed = propose(theta, batch)
            for i, p in enumerate(theta):
                mask = collaborates(g_hat[i], proposed[i] - p)
                ema[i] = smooth(ema[i], mask, beta)
                theta[i] = apply(p, proposed[i], coefficient(ema[i], beta, t))
            t += 1
    return theta
