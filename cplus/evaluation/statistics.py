"""Figures with their uncertainty: shares with Wilson intervals, exact McNemar, means with standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rate:
    """A count out of a total.

    >>> Rate(3, 4).percent
    75.0
    """

    right: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.total or self.total == 0:
            raise ValueError(f"expected a share of at least one row, got {self.right} of {self.total}")

    @property
    def percent(self) -> float:
        """The share, 0 to 100."""
        return 100 * self.right / self.total

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Wilson's interval of the share, 0 to 100."""
        from scipy.stats import binomtest

        found = binomtest(self.right, self.total).proportion_ci(confidence, method="wilson")
        return 100 * float(found.low), 100 * float(found.high)

    def row(self) -> dict[str, Any]:
        """The JSON row: counts, share and 95 % interval."""
        low, high = self.interval()
        return {"right": self.right, "total": self.total, "percent": self.percent, "low": low, "high": high}


def share(outcomes: Iterable[bool]) -> Rate:
    """The rate of true among outcomes.

    >>> share([True, False, False, True])
    Rate(right=2, total=4)
    """
    seen = list(outcomes)
    return Rate(sum(seen), len(seen))


def mcnemar(lost: int, gained: int) -> float:
    """The exact p-value that as many rows change one way as the other: a fair coin's, two-sided.

    >>> mcnemar(10, 0), mcnemar(0, 0)
    (0.001953125, 1.0)
    """
    from scipy.stats import binomtest

    return float(binomtest(lost, lost + gained, 0.5).pvalue) if lost + gained else 1.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with its standard error; one seed has none."""

    mean: float
    error: float | None
    count: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """The mean's 95 % interval by Student's t; None for a single value.

        >>> [round(end, 2) for end in Estimate(3.0, 0.5, 5).interval]
        [1.61, 4.39]
        """
        from scipy.special import stdtrit

        if self.error is None:
            return None
        half = float(stdtrit(self.count - 1, 0.975)) * self.error
        return self.mean - half, self.mean + half


def estimate(values: Sequence[float]) -> Estimate:
    """The mean and its standard error, from the sample's standard deviation.

    >>> estimate([1.0, 3.0])
    Estimate(mean=2.0, error=1.0, count=2)
    """
    if not values:
        raise ValueError("expected at least one value to average, got none")
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return Estimate(statistics.fmean(values), error, len(values))


def weighted(values: Sequence[float], weights: Sequence[float]) -> Estimate:
    """The weighted mean and its standard error over rows, each row's residual linearised as for a ratio of sums.

    With rows' losses per token and their numbers of tokens this is the mean over all tokens, and the rows are what is
    sampled. Equal weights give `estimate`.

    >>> weighted([1.0, 3.0], [1, 1])
    Estimate(mean=2.0, error=1.0, count=2)
    """
    if not values:
        raise ValueError("expected at least one value to average, got none")
    total, count = math.fsum(weights), len(values)
    mean = math.fsum(w * v for v, w in zip(values, weights, strict=True)) / total
    if count == 1:
        return Estimate(mean, None, 1)
    spread = math.fsum((w * (v - mean)) ** 2 for v, w in zip(values, weights, strict=True))
    return Estimate(mean, math.sqrt(spread * count / (count - 1)) / total, count)


def noise_floor(first: Sequence[tuple[float, int]], second: Sequence[tuple[float, int]]) -> float:
    """The difference in mean loss per token that sampling alone explains, in nats.

    Both are one model's own answers to the same rows, such as greedy and sampled, each given by its log-likelihood and
    its number of tokens. The floor is the half width of the 95 % interval of the mean difference.

    >>> round(noise_floor([(-1.0, 1), (-2.0, 1), (-3.0, 1)], [(-2.0, 1), (-2.0, 1), (-2.0, 1)]), 2)
    2.48
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"expected two answers to each of at least two rows, got {len(first)} and {len(second)}")
    differences = [one / n - other / m for (one, n), (other, m) in zip(first, second, strict=True)]
    low, high = _interval(estimate(differences))
    return (high - low) / 2


def _interval(found: Estimate) -> tuple[float, float]:
    ends = found.interval
    assert ends is not None
    return ends


def token_loss(scored: Iterable[tuple[float, int]]) -> float:
    """The mean loss per token over responses, each given by its log-likelihood and its number of tokens.

    >>> token_loss([(-3.0, 1), (-1.0, 3)])
    1.0
    """
    pairs = list(scored)
    return -sum(total for total, _ in pairs) / sum(count for _, count in pairs)
