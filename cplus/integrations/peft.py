"""Adapters under the gate: trained parameters are gated, frozen or quantised ones are left unchanged."""

from __future__ import annotations

from torch import nn

from cplus.core.guard import Guard


def scope(model: nn.Module, guard: Guard) -> str:
    """What the gate acts on, in one sentence."""
    params = guard.params if guard.zero is None else guard.zero.trained
    gated = {id(p) for p in params}
    frozen = [p for p in model.parameters() if id(p) not in gated]
    packed = sum(not p.is_floating_point() for p in frozen)
    count = sum(getattr(p, "ds_numel", p.numel()) for p in params)  # ZeRO 3 leaves the parameters themselves empty
    sentence = f"the gate acts on {len(params)} tensors of {count:,} coordinates"
    if frozen:
        quantised = f", {packed} of them quantised," if packed else ""
        sentence += f"; {len(frozen)} tensors{quantised} are frozen and do not change"
    for choice in guard.chosen:
        sentence += f"; of {choice.name} only {len(choice.rows):,} of {choice.total:,} rows train"
    return sentence
