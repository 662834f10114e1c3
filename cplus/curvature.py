"""The curvature gate: a coordinate moves the less, the more past rows depend on it at the base model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cplus.cost import Work
from cplus.data.batching import measured
from cplus.evidence import Losses, Reference, Source, borrowed_gradients, check_finite, named, refuse_unreached
from cplus.losses import answer_losses
from cplus.passes import Turn
from cplus.ranks import Layout, layout, local

VALUES = 1 << 15
"""The number of bfloat16 values that are not negative; their bits count upwards with the value."""


def attenuation(squares: Tensor, damping: float) -> Tensor:
    """The share of each coordinate of the proposal that is applied; 1 where past rows do not depend on it.

    c = d / (d + F)

    >>> attenuation(torch.tensor([0.0, 1.0, 3.0]), 1.0)
    tensor([1.0000, 0.5000, 0.2500])
    """
    return damping / (damping + squares)


def damping(squares: Sequence[Tensor], share: float, where: Layout) -> float:
    """The d with which the mean of d / (d + F) over all coordinates with F > 0 is `share`; 1 if there are none.

    F is rounded to bfloat16 here and counted by value, so that shards add up to the same counts bit for bit.

    >>> round(damping([torch.tensor([0.0, 1.0, 1.0])], 0.5, Layout()), 6)
    1.0
    """
    counts = torch.zeros(VALUES, dtype=torch.float64, device=squares[0].device)
    for own in squares:
        bits = own.detach().bfloat16().view(torch.int16).flatten().int()
        counts += torch.bincount(bits, minlength=VALUES)[:VALUES]
    counts = (where.sum(counts) if where.sharded else counts).cpu()
    values = torch.arange(VALUES, dtype=torch.int16).view(torch.bfloat16).double()
    used = (counts > 0) & (values > 0) & values.isfinite()
    counts, values = counts[used], values[used]
    if not len(values):
        return 1.0
    low, high = math.log(float(values[0])) - 40.0, math.log(float(values[-1])) + 40.0
    for _ in range(60):
        middle = (low + high) / 2
        found = float((counts * attenuation(values, math.exp(middle))).sum() / counts.sum())
        low, high = (middle, high) if found < share else (low, middle)
    return math.exp((low + high) / 2)


@dataclass(frozen=True, kw_only=True)
class Curvature:
    """Evidence that is the coefficients themselves, in bfloat16: two bytes per parameter.

        F = sum_s w_s * mean_{i in s} (d loss_i / d theta)^2,    c = d / (d + F),    mean of c over F > 0: `share`

    F is the diagonal of the empirical Fisher information of anchors and probes, the second order of what a change of a
    coordinate costs past rows. One damping d for all tensors: whole layers that matter more move less.
    """

    model: nn.Module
    sources: tuple[Source, ...]
    share: float
    losses: Losses = answer_losses

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """One backward pass per row at the current parameters."""
        where = layout(params, named(self.model))
        for source in self.sources:
            where.check_alike(source.at(refresh), source.name, params[0].device)
        squares, totals, work = self._squares(params, refresh, where)
        means = {s.name: total / len(s.at(refresh)) for s, total in zip(self.sources, totals, strict=True)}
        check_finite(self.model, params, squares, means, where)
        strength = damping(squares, self.share, where)
        total = sum(float(own.double().sum()) for own in squares)
        total = where.sums([total], squares[0].device)[0] if where.sharded else total
        coefficients = [attenuation(own, strength).bfloat16() for own in squares]
        return Reference(vectors=[coefficients], losses=means, work=work, norm=math.sqrt(total))

    def _squares(
        self, params: Sequence[nn.Parameter], refresh: int, where: Layout
    ) -> tuple[list[Tensor], list[float], Work]:
        """F, each source's summed loss, and the passes. Shards see every row; whole copies share the rows."""
        seen = [
            (i, source.weight / len(source.at(refresh)), row)
            for i, source in enumerate(self.sources)
            for row in source.at(refresh)
        ]
        own = seen if where.sharded else where.rows(seen)
        squares = [torch.zeros_like(local(p), dtype=torch.float32) for p in params]
        totals = [0.0] * len(self.sources)
        with borrowed_gradients(self.model, params) as passes:
            for i, weight, row in own:
                loss = self.losses(self.model, [row]).sum()
                passes.backward(loss, Turn(alone=True))
                totals[i] += float(loss.detach())
                for square, gradient in zip(squares, passes.take(), strict=True):
                    if gradient is not None:
                        square.addcmul_(gradient.float(), gradient.float(), value=weight)
            if own:
                refuse_unreached(self.model, passes.trained, passes.unreached())
        if not where.sharded:
            squares = [where.sum(square) for square in squares]
            totals = where.sums(totals, squares[0].device)
        return squares, totals, sum((measured([row]) for _, _, row in seen), Work())
