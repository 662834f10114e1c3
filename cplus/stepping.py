"""What the guard reads of a torch optimizer during its step."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

_HOOKED = Optimizer.profile_hook_step(lambda _: None).__code__


def nested(optimizer: Optimizer) -> bool:
    """Whether a hook was called by a step inside a step: torch hooks both if a subclass calls `super().step()`.

    The outer step's hooks see the whole update. A failed step would upset a counter, so the call stack is read.
    """
    steps, frame = 0, sys._getframe(1).f_back
    while frame is not None and steps < 2:
        steps += frame.f_code is _HOOKED and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


def first_moments(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """The optimizer's running mean of each parameter's gradient, or the gradient itself if it keeps no such mean.

    None if there is no gradient or if the mean is stored in a form that cannot be read.
    """
    averages = {
        id(p): bool(group.get("betas") or group.get("momentum"))
        for group in optimizer.param_groups
        for p in group["params"]
    }
    found: list[Tensor | None] = []
    for p in params:
        state = optimizer.state.get(p, {})
        kept = state.get("exp_avg", state.get("momentum_buffer"))
        found.append(None if p.grad is None else kept if kept is not None else None if averages[id(p)] else p.grad)
    return found
