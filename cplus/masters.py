"""AdamW for a model in 16 bits: it steps float32 masters, so that small steps count, and rounds them into the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cplus.optim import AdamW

KEY = "masters"


def in_model(p: nn.Parameter) -> nn.Parameter:
    """The model's parameter that a master belongs to; any other parameter is its own."""
    found: nn.Parameter = getattr(p, "in_model", p)
    return found


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
