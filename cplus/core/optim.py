"""Optimizers whose step holds the gate in one pass, float32 masters for 16-bit models, and what the guard reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cplus.core import kernels
from cplus.core.engine import in_model, local
from cplus.core.gates import Gate, Proposal
from cplus.core.kernels import Signs

# AdamW that proposes and gates in one pass over memory, without a copy of the parameters.


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


# The compiled gate: one pass over memory, inside our AdamW's own step or after any other optimizer's.


def kernel_inputs(
    gate: Gate, evidence: Sequence[Tensor | Signs], params: Sequence[Tensor], step: int
) -> tuple[list[Signs], list[Tensor], tuple[float, ...]]:
    """Signs, averages and scalars of a step; stored coefficients are an average that does not move."""
    if gate.average is None:
        coefficients = [c for c in evidence if isinstance(c, Tensor)]
        return [Signs.none(c) for c in coefficients], coefficients, kernels.STILL
    gate.average.allocate([local(p) for p in params])
    gate.average.step = step
    signs = [g for g in evidence if isinstance(g, Signs)]
    return signs, gate.average.tensors, kernels.gate_numbers(gate.average.beta, step)


def arm(
    optimizer: Optimizer,
    gate: Gate,
    params: Sequence[nn.Parameter],
    evidence: Sequence[Tensor | Signs],
    step: int,
    show: Callable[[int, Tensor, Tensor], None] | None,
) -> None:
    """Pass a step's evidence and average to our AdamW; `show` gets each position, old value and proposed value."""
    assert isinstance(optimizer, AdamW)
    signs, averages, numbers = kernel_inputs(gate, evidence, params, step)
    positions = {id(p): i for i, p in enumerate(params)}
    optimizer.armed = Armed(
        signs=dict(zip(positions, signs, strict=True)),
        ema=dict(zip(positions, averages, strict=True)) if averages else {},
        numbers=numbers,
        watch=None if show is None else lambda p, theta, proposed: show(positions[id(p)], theta, proposed),
    )


def apply_compiled(
    gate: Gate,
    proposals: Sequence[Proposal],
    evidence: Sequence[Tensor | Signs],
    step: int,
    show: Callable[[Proposal, Tensor], None] | None,
) -> None:
    """Lines 10-13 of Algorithm 1 in one pass per tensor, in place."""
    signs, averages, numbers = kernel_inputs(gate, evidence, [proposal.theta for proposal in proposals], step)
    for i, proposal in enumerate(proposals):
        seen = proposal if show is None else replace(proposal, proposed=proposal.proposed.clone())
        kernels.gate(proposal.theta, proposal.proposed, signs[i], averages[i] if averages else None, numbers)
        if show is not None:
            show(seen, gate.applied(seen))


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


# What the guard reads of a torch optimizer during its step.


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


# AdamW for a model in 16 bits: it steps float32 masters, so that small steps count, and rounds them into the model.


KEY = "masters"


class MasterAdamW(AdamW):
    """Our AdamW over float32 copies of the 16-bit parameters it is given; parameters of 32 bits are their own.

    Gradients are taken from the model before each step, and the stepped masters are rounded into it after. The gate
    sees the masters alone, so it treats a model in bfloat16 as one in float32.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, those of 16 bits by their masters."""
        given = param_group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        named = any(isinstance(p, tuple) for p in given)
        own = [(p[0], _master(p[1])) if isinstance(p, tuple) else _master(p) for p in given] if named else None
        super().add_param_group({**param_group, "params": [_master(p) for p in given] if own is None else own})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of the masters, with the hooks around it, then the rounded values in the model."""
        if closure is not None:
            raise TypeError("a model in 16 bits is stepped without a closure; call backward before step")
        for master, p in self._pairs():
            master.grad = None if p.grad is None else p.grad.float()
        try:
            _hooked_step(self)
        finally:
            for master, p in self._pairs():
                master.grad = None
                p.copy_(master)

    step.hooked = True  # type: ignore[attr-defined]  # the hooks run around the masters' step alone

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empty the gradients of the model's parameters."""
        super().zero_grad(set_to_none)
        for _, p in self._pairs():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """torch's state and the masters, in the order of the parameters."""
        return {**super().state_dict(), KEY: [master.detach() for master, _ in self._pairs()]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state; one without masters is refused, because the model's weights are rounded."""
        pairs, kept = list(self._pairs()), state_dict.get(KEY)
        if kept is None or [m.shape for m in kept] != [m.shape for m, _ in pairs]:
            raise ValueError(
                f"expected an optimizer state with {len(pairs)} float32 masters of these shapes, got "
                f"{'none' if kept is None else 'others'}; load one that MasterAdamW of this model saved"
            )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != KEY})
        for (master, p), value in zip(pairs, kept, strict=True):
            master.copy_(value)
            p.copy_(master)

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each master and its parameter in the model."""
        for group in self.param_groups:
            for p in group["params"]:
                if in_model(p) is not p:
                    yield p, in_model(p)


def _master(p: Any) -> Any:
    if not p.is_floating_point() or p.element_size() >= 4:
        return p
    master = nn.Parameter(p.detach().float(), p.requires_grad)
    master.in_model = p  # type: ignore[attr-defined]
    return master


def _hooked_step(optimizer: AdamW) -> None:
    """Our AdamW's step with the optimizer's hooks; torch adds them once it has seen an optimizer of just that class."""
    step: Any = AdamW.step
    (step if getattr(step, "hooked", False) else Optimizer.profile_hook_step(step))(optimizer)
