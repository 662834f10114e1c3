"""AdamW that proposes and gates in one pass over memory, without a copy of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cplus import kernels
from cplus.ranks import local


@dataclass(frozen=True, slots=True)
class Armed:
    """What one gated step needs besides the optimizer's own state, by parameter identity.

    `ema` is empty for a gate that keeps no average. `watch` is called after each parameter's step with the parameter,
    its old value and the proposed value.
    """

    signs: dict[int, kernels.Signs]
    ema: dict[int, Tensor]
    numbers: tuple[float, ...]
    watch: Callable[[nn.Parameter, Tensor, Tensor], None] | None = None


class AdamW(torch.optim.AdamW):
    """torch's AdamW: same arguments, same state, same numbers; without a gate it runs torch's fused step.

    `cplus.protect` arms it before a step; the step then proposes and gates each coordinate in one kernel.
    """

    armed: Armed | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        # torch's fused kernel divides by the gradient scale itself; the gated kernel leaves that to the scaler.
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step, gated if armed; it disarms the optimizer. A closure is evaluated first and may arm it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        armed, self.armed = self.armed, None
        if armed is None:
            _unhooked(torch.optim.AdamW.step)(self)
        else:
            self._gated(armed)
        return loss

    def _gated(self, armed: Armed) -> None:
        """Propose and gate every parameter that has a gradient; for the others only the average advances."""
        pending = dict(armed.ema)
        for p, gradient, state, numbers in self._work(armed):
            theta = None if armed.watch is None else local(p).clone()
            moments = (local(state["exp_avg"]), local(state["exp_avg_sq"]))
            kernels.adamw(local(p), local(gradient), *moments, armed.signs[id(p)], pending.pop(id(p), None), numbers)
            if armed.watch is not None and theta is not None:
                armed.watch(p, theta, proposed(theta, moments, numbers))
        for ema in pending.values():
            kernels.advance(ema, armed.numbers)

    def _work(self, armed: Armed) -> Iterator[tuple[nn.Parameter, Tensor, dict[str, Tensor], tuple[float, ...]]]:
        """Every parameter that has a gradient, with its state created and its step counted as in torch."""
        for group in self.param_groups:
            known: dict[float, tuple[float, ...]] = {}
            moving = [p for p in group["params"] if p.grad is not None and id(p) in armed.signs]
            for p in moving:
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            if moving:
                torch._foreach_add_([self.state[p]["step"] for p in moving], 1)
            for p in moving:
                state = self.state[p]
                t = state["step"].item()
                if t not in known:
                    known[t] = step_numbers(group, t, armed)
                yield p, p.grad, state, known[t]


def _unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own step without the hook calls that torch wraps around it once an optimizer of its own class exists.

    The hooks already run around this class's step; running them again inside it would count every step twice.
    """
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def proposed(theta: Tensor, moments: tuple[Tensor, Tensor], numbers: tuple[float, ...]) -> Tensor:
    """The value that the one-pass kernel proposed, computed from the moments it stored."""
    decay, step, root, eps = numbers[3:7]
    direction = moments[1].sqrt().mul_(root).add_(eps)
    torch.div(moments[0], direction, out=direction)
    return (theta * decay).sub_(direction.mul_(step))


def step_numbers(group: dict[str, Any], t: float, armed: Armed) -> tuple[float, ...]:
    """The scalars of one step in the order `kernels.adamw` reads them."""
    beta1, beta2 = group["betas"]
    lr, decay = float(group["lr"]), group["weight_decay"]
    step, root = lr / (1.0 - beta1**t), (1.0 - beta2**t) ** -0.5
    return (1.0 - beta1, beta2, 1.0 - beta2, 1.0 - lr * decay, step, root, group["eps"], *armed.numbers)
