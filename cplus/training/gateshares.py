"""Where the gate acted: the share of the proposed update that it admitted, per layer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from cplus.core.algorithm import collaborates
from cplus.core.engine import local
from cplus.core.guard import Guard

_LAYER = re.compile(r"\blayers?\.(\d+)\.|\bh\.(\d+)\.|\bblocks\.(\d+)\.")


def layer_of(parameter: str) -> str:
    """The name of the layer that a parameter belongs to.

    >>> layer_of("model.layers.3.mlp.up_proj.weight"), layer_of("model.embed_tokens.weight")
    ('layer 3', 'embed_tokens')
    """
    if match := _LAYER.search(parameter):
        return f"layer {next(number for number in match.groups() if number)}"
    return parameter.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


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

    Empty for a gate with neither. Every process of a sharded job must call it.
    """
    average = None if guard is None or guard.gate is None else guard.gate.average
    if guard is None or average is None or not average.step:
        return []
    tensors = average.tensors
    layers: dict[str, list[float]] = {}
    for i, p in enumerate(guard.params):
        delta = last_update(guard.optimizer, p)
        if tensors:
            c = average.coefficient(tensors[i])
        elif delta is not None:
            c = collaborates(guard.gating.evidence_at(i), delta)
        else:
            return []
        sums = layers.setdefault(layer_of(guard.names.get(id(p), "others")), [0.0] * 4)
        energies = [] if delta is None else [float(own.double().square().sum()) for own in (delta, c * delta)]
        for k, value in enumerate([float(c.numel()), float(c.double().sum()), *energies]):
            sums[k] += value
    totals = [value for sums in layers.values() for value in sums]
    if guard.engine.sharded:
        totals = guard.engine.sums(totals, guard.params[0].device)
    return [
        LayerShare(
            name=name,
            coordinates=int(totals[i]),
            admitted=min(1.0, totals[i + 1] / totals[i]),
            energy=totals[i + 3] / totals[i + 2] if totals[i + 2] else None,
        )
        for i, name in zip(range(0, len(totals), 4), layers, strict=True)
    ]


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
