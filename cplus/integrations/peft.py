"""Adapters under the gate: what trains is gated, what is frozen or quantised is not touched."""

from __future__ import annotations

from torch import nn

from cplus.attach import Guard


def scope(model: nn.Module, guard: Guard) -> str:
    """What the gate acts on, in one sentence."""
    gated = {id(p) for p in guard.params}
    frozen = [p for p in model.parameters() if id(p) not in gated]
    packed = sum(not p.is_floating_point() for p in frozen)
    count = sum(p.numel() for p in guard.params)
    said = f"the gate acts on {len(guard.params)} tensors of {count:,} coordinates"
    if frozen:
        quantised = f", {packed} of them quantised," if packed else ""
        said += f"; {len(frozen)} tensors{quantised} are frozen and do not move"
    return said
