"""Figures with their uncertainty, at matched learning, and over sequences of tasks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, TypedDict

# Figures with their uncertainty: shares with Wilson intervals, exact McNemar, means with standard errors.


class RateRow(TypedDict):
    """A rate as JSON: counts, share and 95 % interval, both 0 to 100."""

    right: int
    total: int
    percent: float
    low: float
    high: float


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

    def row(self) -> RateRow:
        """The JSON row."""
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


def mcnemar_interval(lost: int, gained: int, rows: int, level: float) -> tuple[float, float, float]:
    """The exact one-sided p-value of a loss, and the ends of lost less gained in points of all rows.

    The lower end is above 0 exactly where p is below the level. The upper end is the largest share of rows that can
    have been lost, as no row that is gained hides a larger one.

    >>> p, low, high = mcnemar_interval(8, 0, 60, 0.05)
    >>> p == 0.5**8, 0 < low < 100 * 8 / 60 < high
    (True, True)
    """
    from scipy.stats import binomtest

    most = 100 * float(binomtest(lost, rows).proportion_ci(1 - 2 * level, method="exact").high)
    if lost + gained == 0:
        return 1.0, 0.0, most
    found = binomtest(lost, lost + gained, alternative="greater")
    low = float(found.proportion_ci(1 - level, method="exact").low)
    return float(found.pvalue), 100 * (2 * low - 1) * (lost + gained) / rows, most


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


def token_loss(scored: Iterable[tuple[float, int]]) -> float:
    """The mean loss per token over responses, each given by its log-likelihood and its number of tokens.

    >>> token_loss([(-3.0, 1), (-1.0, 3)])
    1.0
    """
    pairs = list(scored)
    return -sum(total for total, _ in pairs) / sum(count for _, count in pairs)


# Matched learning: what methods have lost at the point where all have learned the new rows equally well.


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


# Figures for tasks learned one after another: pure functions of an accuracy matrix and of the rows' histories.


Matrix = Sequence[Sequence[float | None]]
"""Accuracy by stage and task; row 0 is the base model, row k the model after task k (column k - 1)."""


def average_accuracy(matrix: Matrix, stage: int) -> float:
    """The unweighted mean accuracy, after a stage, over the tasks encountered so far.

    Paper: Sec. 4.1, Evaluation; App. E.9.    A_k = 1/k * sum over i <= k of a[k][i]

    >>> average_accuracy([[50, 40], [90, 45], [70, 80]], 2)
    75.0
    """
    if not 1 <= stage < len(matrix):
        raise ValueError(f"expected a stage from 1 to {len(matrix) - 1}, got {stage}")
    return statistics.fmean(_cell(matrix, stage, task) for task in range(stage))


def backward_transfer(matrix: Matrix) -> float | None:
    """The effect of later tasks on earlier ones, in points; below 0 is forgetting. None before a second task.

    Source: Lopez-Paz and Ranzato 2017, Eq. 3.    BWT = 1/(T-1) * sum over i < T of a[T][i] - a[i][i]

    >>> backward_transfer([[50, 40], [90, 45], [70, 80]])
    -20.0
    """
    last = len(matrix) - 1
    if last < 2:
        return None
    return statistics.fmean(_cell(matrix, last, task) - _cell(matrix, task + 1, task) for task in range(last - 1))


def survival(histories: Sequence[Sequence[bool]]) -> list[float]:
    """The share of learned rows still right after 0, 1, ... further stages, 0 to 100.

    A history is whether a row was right after its own stage and after each later one. Rows that were wrong after their
    own stage were never learned and are omitted; a row once lost stays lost. Rows of later tasks were evaluated for
    fewer stages and count for as long as they were (Kaplan and Meier 1958).

        S(0) = 100,    S(d) = S(d-1) * (1 - lost at d / rows still right at d-1 and evaluated at d)

    >>> survival([[True, True, False], [True, False, True], [True, True], [True, False], [False, True]])
    [100.0, 50.0, 0.0]
    """
    learned = [list(history) for history in histories if history and history[0]]
    if not learned:
        return []
    curve = [100.0]
    for age in range(1, max(map(len, learned))):
        at_risk = [history for history in learned if len(history) > age and all(history[:age])]
        lost = sum(not history[age] for history in at_risk)
        curve.append(curve[-1] * (1 - lost / len(at_risk)) if at_risk else curve[-1])
    return curve


def _cell(matrix: Matrix, stage: int, task: int) -> float:
    value = matrix[stage][task]
    if value is None:
        raise ValueError(f"task {task + 1} was not evaluated after stage {stage}")
    return value
