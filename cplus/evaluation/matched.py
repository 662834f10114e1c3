"""Matched learning: what methods have lost at the point where all have learned the new rows equally well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

LossPoint: TypeAlias = tuple[float, float]
"""The mean token losses of new and of past answers at one evaluation."""


def common_level(curves: Iterable[Sequence[LossPoint]]) -> float:
    """The lowest loss on new answers that every curve reaches.

    >>> common_level([[(3.0, 1.0), (0.5, 4.0)], [(3.0, 1.0), (1.0, 2.0)]])
    1.0
    """
    return max(min(new for new, _ in curve) for curve in curves)


def crossing(curve: Sequence[LossPoint], level: float) -> float:
    """The loss on past answers when the loss on new answers first reaches the level, interpolated linearly.

    >>> crossing([(3.0, 1.0), (1.0, 2.0), (0.5, 4.0)], 2.0)
    1.5
    """
    if curve[0][0] <= level:
        return curve[0][1]
    for (new, past), (new_next, past_next) in pairwise(curve):
        if new_next <= level:
            return past + (past_next - past) * (new - level) / (new - new_next)
    lowest = min(new for new, _ in curve)
    raise ValueError(f"expected a curve that falls to {level}, got one from {curve[0][0]} to {lowest}")


def rise(curve: Sequence[LossPoint], level: float) -> float:
    """How much higher the loss on past answers is at the level than at the first evaluation.

    >>> rise([(3.0, 1.0), (1.0, 2.0)], 2.0)
    0.5
    """
    return crossing(curve, level) - curve[0][1]
