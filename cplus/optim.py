"""AdamW whose proposal and gate are one pass over memory: no copy of the parameters is ever made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cplus import kernels


@dataclass(frozen=True, slots=True)
class Armed:
    """What one gated step needs besides the optimizer's own state, by parameter identity."""

    signs: dict[int, kernels.Signs]
    ema: dict[int, Tensor]
    numbers: tuple[float, ...]


class AdamW(torch.optim.AdamW):
    """torch's AdamW: same arguments, same state, same numbers; ungated it is torch's fused step.

    `cplus.protect` arms it before a step, and the step then proposes and gates each coordinate in one kernel.
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
        # torch's fused kernel divides by a gradient scaler's scale itself; the gated one leaves that to the scaler.
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step; gated if armed, and disarmed by it."""
        armed, self.armed = self.armed, None
        if armed is None:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p, gradient, state, numbers in self._work(armed):
            tensors = (p.detach(), gradient, state["exp_avg"], state["exp_avg_sq"])
            kernels.on_rows(kernels.adamw_block, tensors, armed.signs[id(p)], armed.ema[id(p)], numbers)
        return loss

    def _work(self, armed: Armed) -> Iterator[tuple[nn.Parameter, Tensor, dict[str, Tensor], Tensor]]:
        """Every parameter that has a gradient, with its state created and its step counted as torch does."""
        for group in self.param_groups:
            known: dict[float, Tensor] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                t = float(state["step"])
                if t not in known:  # one small tensor for all parameters of the group, so nothing recompiles
                    known[t] = kernels.scalars(step_numbers(group, t, armed), p.device)
                yield p, p.grad, state, known[t]


def step_numbers(group: dict[str, Any], t: float, armed: Armed) -> tuple[float, ...]:
    """The scalars of one step in the order `kernels.adamw_block` reads them."""
    beta1, beta2 = group["betas"]
    lr, decay = float(group["lr"]), group["weight_decay"]
    step, root = lr / (1.0 - beta1**t), (1.0 - beta2**t) ** 0.5
    return (1.0 - beta1, beta2, 1.0 - beta2, 1.0 - lr * decay, step, root, group["eps"], *armed.numbers)
