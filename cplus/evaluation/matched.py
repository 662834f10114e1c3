"""Matched learning: what methods have lost where all have learned the new rows equally well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

Look: TypeAlias = tuple[float, float]
"""The mean token losses of the new and of the past answers at one moment."""


def common_level(curves: Iterable[Sequence[Look]]) -> float:
    """The lowest loss of the new answers that every curve reaches.

    >>> common_level([[(3.0, 1.0), (0.5, 4.0)], [(3.0, 1.0), (1.0, 2.0)]])
    1.0
    """
    return max(min(new for new, _ in curve) for curve in curves)


def crossing(curve: Sequence[Look], level: float) -> float:
    """The past answers' loss where the new answers' first comes down to the level, by straight lines between looks.

    >>> crossing([(3.0, 1.0), (1.0, 2.0), (0.5, 4.0)], 2.0)
    1.5
    """
    if curve[0][0] <= level:
        return curve[0][1]
    for (new, past), (new_next, past_next) in pairwise(curve):
        if new_next <= level:
            return past + (past_next - past) * (new - level) / (new - new_next)
    lowest = min(new for new, _ in curve)
    raise ValueError(f"expected a curve that comes down to {level}, got one from {curve[0][0]} to {lowest}")


def rise(curve: Sequence[Look], level: float) -> float:
    """How much higher the past answers' loss is at the level than at the first look.

    >>> rise([(3.0, 1.0), (1.0, 2.0)], 2.0)
    0.5
    """
    return crossing(curve, level) - curve[0][1]
