"""Evidence under DeepSpeed ZeRO: gradients that an engine reduces and partitions exactly like those it steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from cplus.passes import Turn
from cplus.zero import is_third, partitions


@contextmanager
def running(engine: Any) -> Iterator[Passes]:
    """Passes between two updates; training gradients that wait in the engine would be mixed with the evidence."""
    zero, passes = engine.optimizer, Passes(engine)
    waiting = zero._epilogue_ran_this_backward if is_third(zero) else zero.micro_step_id >= 0
    if waiting or zero.micro_step_id > 0:
        raise RuntimeError(
            "the engine holds gradients of an unfinished accumulation; call guard.refresh() after the engine.step() of "
            "the last micro-batch and before the next backward pass"
        )
    boundary = engine._is_gradient_accumulation_boundary
    hooks = [p.register_hook(passes.note(p)) for p in passes.trained]  # type: ignore[no-untyped-call]
    passes.discard()
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()
        passes.discard()
        engine._is_gradient_accumulation_boundary = boundary
        zero.set_gradient_accumulation_boundary(engine.is_gradient_accumulation_boundary())


class Passes:
    """Backward passes through an engine, whose averaged gradients are taken out instead of being stepped."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.trained: list[nn.Parameter] = [p for p in engine.module.parameters() if p.requires_grad]
        self.reached: set[int] = set()

    def backward(self, loss: Tensor, turn: Turn) -> None:
        """Add a loss's gradient; the last turn ends what the next `take` returns."""
        self.engine.set_gradient_accumulation_boundary(turn.last)
        self.engine.backward(loss, scale_wrt_gas=False)

    def take(self) -> list[Tensor | None]:
        """The gradients since the last call, averaged over the processes, in the layout of the partitions.

        ZeRO's own step puts them there; the torch optimizer's step is replaced for this call, and clipping is off.
        """
        zero = self.engine.optimizer
        inner, found = zero.optimizer, {}

        def note(*_: object, **__: object) -> None:
            for p in (p for group in inner.param_groups for p in group["params"]):
                found[id(p)] = p.grad.detach().clone()

        kept = {name: getattr(zero, name, None) for name in ("clip_grad", "overflow", "_global_grad_norm")}
        linked, step = getattr(zero, "_hp_optimizer_states_linked", None), vars(inner).get("step")
        zero.clip_grad, inner.step = 0.0, note
        if linked is not None:
            zero._hp_optimizer_states_linked = True  # there is no optimizer state before the first step
        try:
            zero.step()
        finally:
            del inner.step
            if step is not None:
                inner.step = step
            for name, value in kept.items():
                setattr(zero, name, value)
            if linked is not None:
                zero._hp_optimizer_states_linked = linked
        self.discard()
        if not found:
            raise FloatingPointError("the evidence is not finite; check the anchors and the precision")
        return [found[id(p)] for p in partitions(self.engine)]

    def unreached(self) -> list[nn.Parameter]:
        """The trained parameters that got no gradient so far."""
        return [p for p in self.trained if id(p) not in self.reached]

    def note(self, p: nn.Parameter) -> Callable[[Tensor], None]:
        """A hook that notes that a parameter got a gradient."""
        return lambda _: self.reached.add(id(p))

    def discard(self) -> None:
        """Empty the engine's gradient buffers; ZeRO 3 would reuse the old gradient of a parameter without a new one."""
        zero = self.engine.optimizer
        zero.zero_grad(set_to_none=True)
        if is_third(zero):
            zero.grad_partitions_flat_buffer.zero_()
            return
        for held in (zero.averaged_gradients, zero.all_grad_tensors):
            held.update(dict.fromkeys(held))
        zero.micro_step_id = -1
