"""The learning-rate schedule, and the number of updates it covers."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from cplus.experiment.settings import Settings
from cplus.loop import Schedule


def build_scheduler(settings: Settings, optimizer: Optimizer, num_new: int) -> LambdaLR:
    """The learning-rate schedule over all epochs, whether or not training stops early."""
    total = settings.epochs * updates_per_epoch(num_new, settings.batch_size)
    warmup = settings.warmup_steps or round(settings.warmup_share * total)
    return LambdaLR(optimizer, lambda step: rate_factor(step, total=total, warmup=warmup, kind=settings.lr_schedule))


def build_schedule(settings: Settings) -> Schedule:
    """How the rows are batched."""
    return Schedule(
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        order=settings.order,
        clip_norm=settings.clip_norm or None,
    )


def rate_factor(step: int, *, total: int, warmup: int, kind: str) -> float:
    """The factor on the learning rate for the update after `step` others; it is above 0 from the first update on.

    >>> [rate_factor(s, total=4, warmup=2, kind="linear") for s in range(4)]
    [0.3333333333333333, 0.6666666666666666, 1.0, 0.5]
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total - warmup)
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}[kind]


def updates_per_epoch(num_new: int, batch_size: int) -> int:
    """The number of updates in an epoch.

    >>> updates_per_epoch(10, 4)
    3
    """
    return math.ceil(num_new / batch_size)
