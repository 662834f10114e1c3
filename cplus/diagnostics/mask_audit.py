"""The mask audit: the agreement between the masks of few anchors, probes, their blend and all past rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cplus.algorithm import blend
from cplus.data.encoded import Encoded
from cplus.diagnostics.layers import layer_of, middle_down_projection
from cplus.diagnostics.measures import BLOCK, Sums
from cplus.diagnostics.scratch import Shelf
from cplus.diagnostics.sums import LayerSums, agrees
from cplus.diagnostics.taps import NUM_COORDINATES
from cplus.diagnostics.trajectories import BYTES, KEPT, distance, mean_coefficients, replay, tables
from cplus.evidence import MeanGradient, Source, named
from cplus.kernels import Signs, sign_of
from cplus.support import trainable

BUDGETS = (4, 8, 16, 32, 64, 128)
"""The paper's numbers of anchors."""


@dataclass(frozen=True, kw_only=True)
class Evidences:
    """The rows whose masks are compared: `anchors` by their number; `num_anchors` is the number that the run uses."""

    anchors: Mapping[int, Sequence[Encoded]]
    num_anchors: int
    probes: Sequence[Encoded]
    past: Sequence[Encoded]
    anchor_weight: float = 0.5

    def __post_init__(self) -> None:
        if not self.probes:
            raise ValueError("the mask audit compares anchors, probes and past rows, but there are no probes")
        if self.num_anchors not in self.anchors:
            raise ValueError(f"expected {self.num_anchors} among the numbers of anchors, got {sorted(self.anchors)}")


def audit(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Sequence[Encoded]],
    given: Evidences,
    *,
    beta: float = 0.9,
) -> dict[str, Any]:
    """Replay the batches' proposals at the model's weights, which do not change, and compare the references' masks.

    Paper: App. E.8; App. E.11. The optimizer's moments advance, so use a new optimizer.
    """
    params, names = trainable(optimizer), named(model)
    labels = [names.get(id(p), "others") for p in params]
    shelf = Shelf(scratch_bytes(sum(p.numel() for p in params), len(given.anchors)))
    try:
        updates = replay(shelf, model, optimizer, batches, beta=beta)
        keep_signs(shelf, model, params, given)
        layer_sums = LayerSums([layer_of(label) for label in labels])
        for i, p in enumerate(params):
            for sums in compared(shelf, i, p.numel(), given):
                layer_sums.add(i, sums)
        at = middle_down_projection(labels)
        return {
            "updates": updates,
            "past": len(given.past),
            "probes": len(given.probes),
            "budgets": sorted(given.anchors),
            **agreements(layer_sums.epochs()[1], given),
            "references": pairs(layer_sums.epochs()[1], given.num_anchors),
            "layers": [{"layer": layer, **agreements(s, given)} for layer, s in layer_sums.by_layer().items()],
            "coordinates": {"tensor": labels[at], **coordinates(shelf, at, given)},
        }
    finally:
        shelf.close()


def keep_signs(shelf: Shelf, model: nn.Module, params: Sequence[nn.Parameter], given: Evidences) -> None:
    """Store the signs of each source's mean gradient at these weights, and of its blend with the probes'."""

    def gradient(rows: Sequence[Encoded]) -> list[Tensor]:
        source = Source(name="evidence", weight=1.0, rows=rows)
        return MeanGradient(model=model, sources=(source,))(params, 0).vectors[0]

    for i, g in enumerate(gradient(given.probes)):
        shelf.put(f"gradient-{i}", g)
        shelf.put(f"probes-{i}", Signs.of(g).packed)
    for name, rows in (*given.anchors.items(), ("past", given.past)):
        for i, g in enumerate(gradient(rows)):
            shelf.put(f"anchors_{name}-{i}", Signs.of(g).packed)
            blended = blend(g, shelf.get(f"gradient-{i}", g.device), given.anchor_weight)
            shelf.put(f"blend_{name}-{i}", Signs.of(blended).packed)
    for i in range(len(params)):
        shelf.remove(f"gradient-{i}")


def scratch_bytes(parameters: int, budgets: int) -> int:
    """Bytes of scratch that an audit over so many budgets needs: sums, a gradient, and two bits per reference's sign.

    >>> scratch_bytes(596_049_920, 6) < 30e9  # Qwen3-0.6B with the paper's budgets
    True
    """
    return parameters * (BYTES + 4) + (2 * (budgets + 1) + 1) * -(-parameters // 4)


def compared(shelf: Shelf, position: int, size: int, given: Evidences) -> Iterator[Sums]:
    """One tensor's energy and the energy on which each pair of references differs, block by block."""
    for start in range(0, size, BLOCK):
        stop = start + BLOCK
        kept = {name: shelf.read(f"{name}-{position}", start, stop).double() for name in KEPT}
        table = tables(kept)

        def signs(name: str, start: int = start, stop: int = stop) -> Tensor:
            count = min(stop, size) - start
            return sign_of(shelf.read(f"{name}-{position}", start // 4, -(-(start + count) // 4)), count)

        full, own = signs("anchors_past"), signs("blend_past")
        sums = {"energy": float((kept["up"] + kept["down"]).sum())}
        for count in given.anchors:
            blended = signs(f"blend_{count}")
            sums[f"cpl_{count}"] = distance(table["binary"], signs(f"anchors_{count}"), full)
            sums[f"cplus_{count}"] = distance(table["smoothed"], blended, own)
            sums[f"cross_{count}"] = distance(table["crossed"], blended, full)
        for first, second in combinations(compared_names(given.num_anchors).items(), 2):
            sums[f"{first[0]}/{second[0]}"] = distance(table["binary"], signs(first[1]), signs(second[1]))
        yield sums


def compared_names(num_anchors: int) -> dict[str, str]:
    """The references of the pairwise comparison, with the names they are stored under."""
    return {
        "anchors": f"anchors_{num_anchors}",
        "probes": "probes",
        "blend": f"blend_{num_anchors}",
        "past": "anchors_past",
        "past blend": "blend_past",
    }


def agreements(sums: Sums, given: Evidences) -> dict[str, list[float | None]]:
    """By number of anchors: CPL with full-data CPL, CPLUS with full-data CPLUS, CPLUS with full-data CPL."""
    return {
        kind: [agrees(sums[f"{kind}_{count}"], sums["energy"]) for count in sorted(given.anchors)]
        for kind in ("cpl", "cplus", "cross")
    }


def pairs(sums: Sums, num_anchors: int) -> list[dict[str, Any]]:
    """The agreement between the binary masks of each pair of references."""
    return [
        {"first": a, "second": b, "agreement": agrees(sums[f"{a}/{b}"], sums["energy"])}
        for a, b in combinations(compared_names(num_anchors), 2)
    ]


def coordinates(shelf: Shelf, position: int, given: Evidences) -> dict[str, Any]:
    """The coordinates of one tensor with the most update energy, and CPLUS's mean mask there, by number of anchors."""
    cpu = torch.device("cpu")
    sums = {name: shelf.get(f"{name}-{position}", cpu).double() for name in ("up", "down", "plus", "minus")}
    energy = sums["up"] + sums["down"]
    at = energy.topk(min(NUM_COORDINATES, energy.numel())).indices.sort().values
    chosen = {name: values[at] for name, values in sums.items()}
    rows = {}
    for count in (*sorted(given.anchors), "past"):
        signs = sign_of(shelf.get(f"blend_{count}-{position}", cpu), energy.numel())
        means = mean_coefficients(signs[at], chosen)
        rows[str(count)] = " ".join(f"{value:.3g}" for value in means.tolist())
    return {"indices": " ".join(map(str, at.tolist())), "cplus": rows}
