"""Optimizers whose step holds the gate in one pass, float32 masters for 16-bit models, and what the guard reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cplus.core import kernels
from cplus.core.engine import in_model, local
from cplus.core.kernels import Signs

# AdamW that proposes and gates in one pass over memory, without a copy of the parameters.


@dataclass(frozen=True, slots=True)
class Armed:
    """What one gated step needs besides the optimizer's own state.

    `params`, with `signs` and `averages` by unit of the layout, which are empty for a gate without them. `moving` says
    on the device whether anything may move. `watch` is called after each parameter's step with its position, its old
    value and the proposed value.
    """

    params: Sequence[nn.Parameter]
    layout: kernels.Layout
    signs: Sequence[Signs]
    averages: Sequence[Tensor]
    numbers: tuple[float, ...]
    moving: Tensor | None = None
    watch: Callable[[int, Tensor, Tensor], None] | None = None


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
        self._counts: dict[Tensor, float] = {}  # the steps that torch counts on the device
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        # torch's fused kernel divides by the gradient scale itself; the gated kernel leaves that to the scaler.
        self._step_supports_amp_scaling = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state, whose step counts are read at the next step."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._counts = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step, gated if armed; it disarms the optimizer. A closure is evaluated first and may arm it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        armed, self.armed = self.armed, None
        if armed is None:
            self._counts = {}
            _unhooked(torch.optim.AdamW.step)(self)
        else:
            self._gated(armed)
        return loss

    def _gated(self, armed: Armed) -> None:
        """Propose and gate every parameter that has a gradient; for the others only the average advances."""
        layout, numbers = armed.layout, self._numbers(armed)
        for unit, places in enumerate(layout.units):
            params = [armed.params[i] for i in places]
            signs = armed.signs[unit] if armed.signs else None
            ema = armed.averages[unit] if armed.averages else None
            if armed.watch is None and params[0] in numbers and len({id(numbers.get(p)) for p in params}) == 1:
                parts = [(tuple(places), signs, ema)]
            else:
                split = zip(places, layout.split(unit, signs), layout.split(unit, ema), strict=True)
                parts = [((i,), sign, average) for i, sign, average in split]
            for own, sign, average in parts:
                if armed.params[own[0]] in numbers:
                    self._pass(own, sign, average, numbers[armed.params[own[0]]], armed)
                elif average is not None:  # nothing is proposed, so the mask is 1 everywhere
                    beta, rest, _ = armed.numbers
                    average.copy_(kernels.stored(beta * kernels.read(average) + rest, average))

    def _pass(
        self, places: tuple[int, ...], signs: Signs | None, ema: Tensor | None, numbers: kernels.Numbers, armed: Armed
    ) -> None:
        """One call of the kernel, on the parameters at these places."""
        params = [armed.params[i] for i in places]
        values, gradients = [local(p) for p in params], [local(p.grad) for p in params if p.grad is not None]
        first, second = ([local(self.state[p][name]) for p in params] for name in ("exp_avg", "exp_avg_sq"))
        if len(params) == 1:
            theta = values[0].clone() if armed.watch else None
            kernels.adamw(values[0], gradients[0], first[0], second[0], signs, ema, numbers)
            if armed.watch is not None and theta is not None:
                armed.watch(places[0], theta, proposed(theta, first[0], second[0], numbers))
            return
        joined = [torch.cat([t.reshape(-1) for t in own]) for own in (values, gradients, first, second)]
        kernels.adamw(joined[0], joined[1], joined[2], joined[3], signs, ema, numbers)
        for own, whole in ((values, joined[0]), (first, joined[2]), (second, joined[3])):
            parts = torch.split(whole, [t.numel() for t in own])
            torch._foreach_copy_(own, [part.view(t.shape) for part, t in zip(parts, own, strict=True)])

    def _numbers(self, armed: Armed) -> dict[Tensor, kernels.Numbers]:
        """Each parameter's scalars, if it has a gradient; creates the state and counts the step as torch does."""
        rows: dict[tuple[float, ...], list[Tensor]] = {}
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None and p.requires_grad]
            for p in moving:
                if not self.state[p]:
                    self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                    self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                    self._counts[p] = 0.0
            if unknown := [p for p in moving if p not in self._counts]:
                counts = torch.stack([self.state[p]["step"] for p in unknown]).tolist()
                self._counts |= dict(zip(unknown, counts, strict=True))
            if moving:
                torch._foreach_add_([self.state[p]["step"] for p in moving], 1)
            (beta1, beta2), lr = group["betas"], float(group["lr"])
            decay = 1.0 - lr * group["weight_decay"]
            for p in moving:  # the scalars in the order in which `kernels.adamw` reads them
                t = self._counts[p] = self._counts[p] + 1
                step, root = lr / (1.0 - beta1**t), (1.0 - beta2**t) ** -0.5
                row = (1.0 - beta1, beta2, 1.0 - beta2, decay, step, root, group["eps"], *armed.numbers)
                rows.setdefault(row, []).append(p)
        known = kernels.on_device(list(rows), armed.params[0].device, armed.moving)
        return {p: own for own, params in zip(known, rows.values(), strict=True) for p in params}


def _unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own step without the hook calls that torch wraps around it once an optimizer of its own class exists.

    The hooks already run around this class's step; running them again inside it would count every step twice.
    """
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def proposed(theta: Tensor, first: Tensor, second: Tensor, numbers: kernels.Numbers) -> Tensor:
    """The value that the one-pass kernel proposed, computed from the moments it stored."""
    decay, step, root, eps = numbers[3:7]
    return theta * decay - first / (second.sqrt() * root + eps) * step


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


def first_moment(optimizer: Optimizer, p: nn.Parameter) -> Tensor | None:
    """The optimizer's running mean of a parameter's gradient, or the gradient itself if it keeps no such mean.

    None if there is no gradient or if the mean is stored in a form that cannot be read.
    """
    state, [group] = optimizer.state.get(p, {}), [g for g in optimizer.param_groups if any(p is q for q in g["params"])]
    kept: Tensor | None = state.get("exp_avg", state.get("momentum_buffer"))
    if p.grad is None or kept is not None:
        return None if p.grad is None else kept
    return None if group.get("betas") or group.get("momentum") else p.grad


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
        params = [given] if isinstance(given, Tensor) else given
        super().add_param_group({**param_group, "params": [_master(p) for p in params]})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of the masters, with the hooks around it, then the rounded values in the model."""
        if closure is not None:
            raise TypeError("a model in 16 bits is stepped without a closure; call backward before step")
        for master, p in self._pairs():
            master.grad = None if p.grad is None else p.grad.float()
        try:
            # torch adds the hooks once it has seen an optimizer of just this class
            step: Any = AdamW.step
            (step if getattr(step, "hooked", False) else Optimizer.profile_hook_step(step))(self)
        finally:
            for master, p in self._pairs():
                master.grad = None
                p.copy_(master)

    step.hooked = True  # type: ignore[attr-defined]  # the hooks run around the masters' step alone

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empty the gradients of the model's parameters."""
        super().zero_grad(set_to_none)
        for _, p in self._pairs():
            p.grad = None

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
