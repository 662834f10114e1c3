"""What was kept, lost and learned: pure functions of predictions, without torch. `evaluate.task` asks a model."""

from cplus.evaluation.retention_acquisition import (
    Flip,
    acquisition,
    average_task_accuracy,
    correction,
    flips,
    percent,
    recovery,
    retention,
    without,
)
from cplus.evaluation.statistics import Estimate, Rate, estimate, mcnemar

__all__ = [
    "Estimate",
    "Flip",
    "Rate",
    "acquisition",
    "average_task_accuracy",
    "correction",
    "estimate",
    "flips",
    "mcnemar",
    "percent",
    "recovery",
    "retention",
    "without",
]
