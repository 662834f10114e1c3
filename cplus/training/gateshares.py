"""Where the gate acted: the share of the proposed update that it admitted, per layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
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
    tensors, deltas = average.tensors, last_updates(guard.optimizer, guard.params)
    layers: dict[str, list[Tensor]] = {}  # their sums stay on the device: the host reads all of them at once
    coordinates: dict[str, float] = {}
    device = guard.params[0].device
    for i, (p, delta) in enumerate(zip(guard.params, deltas, strict=True)):
        if tensors:
            c = average.coefficient(tensors[i])
        elif delta is not None:
            c = collaborates(guard.gating.evidence_at(i), delta)
        else:
            return []
        energies = [] if delta is None else [own.double().square().sum() for own in (delta, c * delta)]
        sums = torch.stack([c.double().sum(), *energies]).to(device)
        name = layer_of(guard.names.get(id(p), "others"))
        layers.setdefault(name, []).append(F.pad(sums, (0, 3 - len(sums))))
        coordinates[name] = coordinates.get(name, 0.0) + c.numel()
    counts = torch.tensor(list(coordinates.values()), dtype=torch.float64, device=device)
    totals = torch.cat([counts[:, None], torch.stack([torch.stack(own).sum(0) for own in layers.values()])], 1)
    totals = guard.engine.sum(totals) if guard.engine.sharded else totals
    return [
        LayerShare(
            name=name,
            coordinates=int(count),
            admitted=min(1.0, admitted / count),
            energy=kept / proposed if proposed else None,
        )
        for name, (count, admitted, proposed, kept) in zip(layers, totals.tolist(), strict=True)
    ]


def last_updates(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> Iterator[Tensor | None]:
    """What AdamW proposed to add at its last step, up to the learning rate, computed from its moments."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    known = [p for p in params if {"step", "exp_avg", "exp_avg_sq"} <= optimizer.state.get(p, {}).keys()]
    known = [p for p in known if "betas" in groups[id(p)]]
    counted = [torch.as_tensor(optimizer.state[p]["step"]) for p in known]
    steps = torch.stack([count.to(known[0].device) for count in counted]).tolist() if known else []
    taken = dict(zip(map(id, known), steps, strict=True))
    for p in params:
        if id(p) not in taken:
            yield None
            continue
        state, group, t = optimizer.state[p], groups[id(p)], taken[id(p)]
        beta1, beta2 = group["betas"]
        scale = (local(state["exp_avg_sq"]) / (1.0 - beta2**t)).sqrt_().add_(group["eps"])
        step: Tensor = (local(state["exp_avg"]) / (1.0 - beta1**t)).div_(scale)
        yield step.add_(local(p), alpha=group["weight_decay"]).neg_()
