"""Where the gate acted: the share of the proposed update that it admitted, per layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cplus.core import algorithm
from cplus.core.algorithm import collaborates
from cplus.core.engine import local
from cplus.core.guard import Guard

# Which layer a parameter belongs to.


_LAYER = re.compile(r"\blayers?\.(\d+)\.|\bh\.(\d+)\.|\bblocks\.(\d+)\.")
_DOWN = re.compile(r"\b(down_proj|c_proj|fc2|dense_4h_to_h)\b")


def layer_of(parameter: str) -> str:
    """The name of the layer that a parameter belongs to.

    >>> layer_of("model.layers.3.mlp.up_proj.weight"), layer_of("model.embed_tokens.weight")
    ('layer 3', 'embed_tokens')
    """
    if match := _LAYER.search(parameter):
        return f"layer {next(number for number in match.groups() if number)}"
    return parameter.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def middle_down_projection(names: Sequence[str]) -> int:
    """The index of the middle layer's MLP down-projection, or of the middle parameter if there is none.

    >>> middle_down_projection([f"layers.{i}.mlp.down_proj.weight" for i in range(5)])
    2
    """
    found = [i for i, name in enumerate(names) if _DOWN.search(name) and "attn" not in name and "weight" in name]
    return found[len(found) // 2] if found else len(names) // 2


# The measured quantities as sums over one tensor's coordinates, to be added over tensors, layers, steps and epochs.


Sums: TypeAlias = dict[str, float]
BLOCK = 1 << 20  # coordinates processed at a time, so that double precision needs only a few megabytes


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Corresponding parts of tensors of equal shape, flat and in double precision."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), BLOCK):
        yield tuple(part[start : start + BLOCK].double() for part in flat)


def masked(theta: Tensor, proposed: Tensor, g_hat: Tensor) -> Sums:
    """How much of a proposal the binary mask admits, in coordinates and in energy (squared size).

    Paper: App. E.7.    sum m,    sum m delta^2
    """
    found = []
    for t, p, g in blocks(theta, proposed, g_hat):
        delta = p - t
        mask, energy = collaborates(g, delta).double(), delta.square()
        found.append([mask.sum(), (mask * energy).sum(), energy.sum()])
    return {"coordinates": float(theta.numel()), **_added(("mask", "mask_energy", "energy"), found)}


def applied(theta: Tensor, proposed: Tensor, c: Tensor) -> Sums:
    """How much of a proposal the coefficient admits: sum c, and the energy of c * delta."""
    found = []
    for t, p, k in blocks(theta, proposed, c):
        found.append([k.sum(), (k * (p - t)).square().sum()])
    return _added(("coefficient", "coefficient_energy"), found)


def masses(theta: Tensor, proposed: Tensor, g_hat: Tensor, c: Tensor, g_past: Tensor) -> Sums:
    """Harmful mass admitted and safe mass removed, judged by the gradient of all past rows.

    Paper: App. B.    z = g_past * delta;    sum m [z]+,    sum (1 - m) [-z]+,    and the same with c for m
    """
    found = []
    for t, p, g, k, past in blocks(theta, proposed, g_hat, c, g_past):
        delta = p - t
        mask, z = collaborates(g, delta).double(), past * delta
        harm, safe = z.clamp(min=0.0), (-z).clamp(min=0.0)
        removed = [((1.0 - m) * safe).sum() for m in (mask, k)]
        found.append([harm.sum(), safe.sum(), (mask * harm).sum(), removed[0], (k * harm).sum(), removed[1]])
    names = ("harmful", "safe", "mask_harmful", "mask_removed", "coefficient_harmful", "coefficient_removed")
    return _added(names, found)


def apart(theta: Tensor, proposed: Tensor, g_hat: Tensor, reference: Tensor) -> float:
    """The update energy on which two binary masks differ; divided by the whole energy, it is 1 minus the agreement.

    Paper: App. E.11.    sum delta^2 |m - m_reference|
    """
    found = []
    for t, p, g, r in blocks(theta, proposed, g_hat, reference):
        delta = p - t
        found.append([(delta.square() * (collaborates(g, delta) - collaborates(r, delta)).abs().double()).sum()])
    return _added(("apart",), found)["apart"]


def first_order(theta: Tensor, proposed: Tensor, g_hat: Tensor, gradient: Tensor) -> Sums:
    """The first-order change of a loss under the whole proposal and under the part that the binary mask admits.

    Paper: App. B.    g . delta,    g . (m delta)
    """
    found = []
    for t, p, g, past in blocks(theta, proposed, g_hat, gradient):
        delta = p - t
        z = past * delta
        found.append([z.sum(), (z * collaborates(g, delta)).sum()])
    return _added(("change", "gated_change"), found)


def share(part: float, whole: float) -> float | None:
    """A share, or None if the whole is 0.

    >>> share(1.0, 4.0), share(0.0, 0.0)
    (0.25, None)
    """
    return part / whole if whole else None


def _added(names: tuple[str, ...], found: list[list[Tensor]]) -> Sums:
    total = torch.stack([torch.stack(row) for row in found]).sum(0)
    return dict(zip(names, total.tolist(), strict=True))


# Sums collected during a run, and the shares computed from them at the end.


class LayerSums:
    """Sums by epoch and layer; `epoch` is the current one."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = layers
        self.epoch = 1
        self._rows: dict[tuple[int, str], Sums] = {}

    def add(self, position: int, sums: Sums) -> None:
        """Add the sums of one parameter at one step."""
        row = self._rows.setdefault((self.epoch, self.layers[position]), {})
        for name, value in sums.items():
            row[name] = row.get(name, 0.0) + value

    def epochs(self) -> dict[int, Sums]:
        """The sums over all layers."""
        return {
            epoch: total(row for (e, _), row in self._rows.items() if e == epoch)
            for epoch in dict.fromkeys(epoch for epoch, _ in self._rows)
        }

    def by_layer(self) -> dict[str, Sums]:
        """The sums over all epochs."""
        return {
            layer: total(row for (_, name), row in self._rows.items() if name == layer)
            for layer in dict.fromkeys(layer for _, layer in self._rows)
        }


def total(rows: Iterable[Sums]) -> Sums:
    """The sum of sums, name by name.

    >>> total([{"a": 1.0}, {"a": 2.0, "b": 3.0}])
    {'a': 3.0, 'b': 3.0}
    """
    found: Sums = {}
    for row in rows:
        for name, value in row.items():
            found[name] = found.get(name, 0.0) + value
    return found


def admitted(sums: Sums) -> dict[str, Any]:
    """The shares of coordinates and of update energy that the mask and, if applied, the coefficient admitted."""
    return {
        kind: {
            "coordinates": share(sums[kind], sums["coordinates"]),
            "energy": share(sums[f"{kind}_energy"], sums["energy"]),
        }
        for kind in ("mask", "coefficient")
        if kind in sums
    }


def judged(sums: Sums) -> dict[str, Any]:
    """Harmful mass admitted and safe mass removed, their shares of the proposals' totals, and the masks' agreement."""
    kinds = {
        kind: {
            "harmful_admitted": sums[f"{kind}_harmful"],
            "harmful_admitted_share": share(sums[f"{kind}_harmful"], sums["harmful"]),
            "safe_removed": sums[f"{kind}_removed"],
            "safe_removed_share": share(sums[f"{kind}_removed"], sums["safe"]),
        }
        for kind in ("mask", "coefficient")
    }
    agreement = {name: agrees(sums[f"apart_{name}"], sums["energy"]) for name in ("own", "cpl")}
    return {"harmful": sums["harmful"], "safe": sums["safe"], **kinds, "agreement": agreement}


def agrees(apart: float, energy: float) -> float | None:
    """Agreement from the energy on which two masks differ; None if nothing was proposed.

    >>> agrees(1.0, 4.0)
    0.75
    """
    return 1.0 - apart / energy if energy else None


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
    if not guard.engine.sharded:
        return layers
    values = [value for sums in layers.values() for value in sums.values()]
    totals = iter(guard.engine.sums(values, guard.params[0].device))
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
