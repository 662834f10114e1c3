"""Where the gate acted: the share of the proposed update that it admitted, per layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from cplus import algorithm
from cplus.attach import Guard
from cplus.diagnostics.layers import layer_of
from cplus.diagnostics.measures import Sums, share
from cplus.diagnostics.sums import LayerSums
from cplus.ranks import local


@dataclass(frozen=True, kw_only=True)
class LayerShare:
    """One layer's number of coordinates, their mean coefficient, and the admitted share of the last update's energy.

    The last update can be recomputed only for an optimizer that keeps Adam's moments.
    """

    name: str
    coordinates: int
    admitted: float
    energy: float | None = None


def layer_shares(guard: Guard | None) -> list[LayerShare]:
    """The admitted share per layer, from the gate's moving average or, without one, from the last update's mask.

    Empty for a gate with neither.
    """
    average = None if guard is None or guard.gate is None else guard.gate.average
    if guard is None or average is None or not average.step:
        return []
    layer_sums = LayerSums([layer_of(guard.names.get(id(p), "others")) for p in guard.params])
    for i, p in enumerate(guard.params):
        delta = last_update(guard.optimizer, p)
        if average.tensors:
            c = average.coefficient(i)
        elif delta is not None:
            c = algorithm.collaborates(guard.evidence_at(i), delta)
        else:
            return []
        sums = {"coordinates": float(c.numel()), "admitted": float(c.double().sum())}
        if delta is not None:
            sums["whole"] = float(delta.double().square().sum())
            sums["energy"] = float((c * delta).double().square().sum())
        layer_sums.add(i, sums)
    return [
        LayerShare(
            name=name,
            coordinates=int(sums["coordinates"]),
            admitted=min(1.0, sums["admitted"] / sums["coordinates"]),
            energy=share(sums.get("energy", 0.0), sums.get("whole", 0.0)),
        )
        for name, sums in _over_processes(layer_sums.by_layer(), guard).items()
    ]


def _over_processes(layers: dict[str, Sums], guard: Guard) -> dict[str, Sums]:
    """The layers' sums over all shards; every process must call it."""
    if not guard.where.sharded:
        return layers
    values = [value for sums in layers.values() for value in sums.values()]
    totals = iter(guard.where.sums(values, guard.params[0].device))
    return {layer: {name: next(totals) for name in sums} for layer, sums in layers.items()}


def last_update(optimizer: Optimizer, p: nn.Parameter) -> Tensor | None:
    """What AdamW proposed to add at its last step, up to the learning rate, computed from its moments."""
    state = optimizer.state.get(p, {})
    [group] = [group for group in optimizer.param_groups if any(q is p for q in group["params"])]
    if not {"step", "exp_avg", "exp_avg_sq"} <= state.keys() or "betas" not in group:
        return None
    (beta1, beta2), t = group["betas"], float(state["step"])
    scale = (local(state["exp_avg_sq"]) / (1.0 - beta2**t)).sqrt_().add_(group["eps"])
    step: Tensor = (local(state["exp_avg"]) / (1.0 - beta1**t)).div_(scale)
    return step.add_(local(p), alpha=group["weight_decay"]).neg_()
