"""Where the gate acted: how much of the proposed update each layer was let have, in the end."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cplus import algorithm, kernels
from cplus.attach import Guard
from cplus.gates import Collaborative

_LAYER = re.compile(r"\blayers?\.(\d+)\.|\bh\.(\d+)\.|\bblocks\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class LayerShare:
    """One layer's coordinates and the mean of their coefficients."""

    name: str
    coordinates: int
    admitted: float


def layer_of(parameter: str) -> str:
    """The layer a parameter belongs to, in words.

    >>> layer_of("model.layers.3.mlp.up_proj.weight"), layer_of("model.embed_tokens.weight")
    ('layer 3', 'embed_tokens')
    """
    if match := _LAYER.search(parameter):
        return f"layer {next(number for number in match.groups() if number)}"
    return parameter.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def layer_shares(guard: Guard | None) -> list[LayerShare]:
    """The mean coefficient by layer, from the gate's moving average; a gate that keeps none has nothing to show."""
    if guard is None or not isinstance(guard.gate, Collaborative) or not guard.gate.ema:
        return []
    gate = guard.gate
    totals: dict[str, tuple[float, int]] = {}
    for p, ema in zip(guard.params, gate.ema, strict=True):
        c = algorithm.coefficient(kernels.read(ema), gate.beta, gate.step)
        name = layer_of(guard.names.get(id(p), "others"))
        total, count = totals.get(name, (0.0, 0))
        totals[name] = (total + float(c.double().sum()), count + c.numel())
    return [
        LayerShare(name=name, coordinates=count, admitted=min(1.0, total / count))
        for name, (total, count) in totals.items()
    ]
