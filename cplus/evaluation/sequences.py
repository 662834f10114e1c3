"""Figures for tasks learned one after another: pure functions of an accuracy matrix and of the rows' histories."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

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


def lifetime(history: Sequence[bool]) -> int | None:
    """The number of further stages after which a learned row was first wrong; None if it never was or never learned.

    >>> lifetime([True, True, False, True]), lifetime([True, True])
    (2, None)
    """
    if not history or not history[0] or all(history):
        return None
    return list(history).index(False)


def _cell(matrix: Matrix, stage: int, task: int) -> float:
    value = matrix[stage][task]
    if value is None:
        raise ValueError(f"task {task + 1} was not evaluated after stage {stage}")
    return value
