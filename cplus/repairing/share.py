"""A search for the largest share whose effect stays within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable

RESOLUTION = 0.01
"""The share is found to within this much."""
TRIALS = math.ceil(math.log2(1 / RESOLUTION))
"""Evaluations of the new rows in one search by bisection."""
ENOUGH = 0.85
"""A loss ends the search where this much of the tolerance is used."""
_AIM = 0.95
_WITHIN = 0.1


def largest_share(used: Callable[[float], float], resolution: float, *, smooth: bool = False) -> float:
    """The largest share that uses at most 1 of the tolerance, by bisection; 0 if there is none.

    More undone is taken to use more. Where that fails in between, the share found may be smaller than the largest one,
    but it is always one that was tried. What is smooth in the share is tried where the line through the two nearest
    shares would use 95 %, or halfway after a trial that did not halve the range, and the search ends where at least
    85 % is used.

    >>> largest_share(lambda share: share / 0.4, resolution=0.01)
    0.3984375
    >>> tried = []
    >>> largest_share(lambda share: tried.append(share) or (share / 0.4) ** 2, resolution=0.01, smooth=True)
    0.3781094527363184
    >>> tried
    [0.5, 0.304, 0.3781094527363184]
    """
    low, high, at_low, at_high, slow = 0.0, 1.0, 0.0, math.inf, False
    while high - low > resolution and not (smooth and at_low >= ENOUGH):
        width, part = high - low, 0.5
        if smooth and not slow and math.isfinite(at_high):
            part = min(max((_AIM - at_low) / (at_high - at_low), _WITHIN), 1 - _WITHIN)
        share = low + part * width
        found = used(share)
        if found <= 1:
            low, at_low = share, found
        else:
            high, at_high = share, found
        slow = high - low > width / 2
    return low


def used_of(value: float, tuned: float, limit: float) -> float:
    """How much of what may be given up is given up; up to 1 a value is within its limit."""
    if value <= limit:
        return min(1.0, (value - tuned) / (limit - tuned)) if limit > tuned else 0.0
    return (value - tuned) / (limit - tuned) if value - tuned > limit - tuned > 0 else math.inf
