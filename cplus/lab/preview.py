"""Before any training: where the first update of plain fine-tuning would conflict with what the model should keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from cplus.core.algorithm import blend
from cplus.core.evidence import MeanGradient, Source, named
from cplus.core.rows import Encoded
from cplus.core.shards import trainable
from cplus.lab.diagnostics import Shelf, proposals
from cplus.training.gateshares import LayerSums, Sums, first_order, layer_of, masked, share


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One layer, or the whole model, under the first update that plain fine-tuning would make.

    `conflict` and `conflicting_energy` are the shares of the layer's coordinates and update energy where update and
    evidence have the same sign. `change` is the first-order change of the anchors' loss under the whole update,
    `gated_change` under the part that the binary mask admits.
    """

    name: str
    coordinates: int
    conflict: float | None
    conflicting_energy: float | None
    change: float
    gated_change: float

    @classmethod
    def of(cls, name: str, sums: Sums) -> Forecast:
        """Compute the shares from the sums."""
        return cls(
            name=name,
            coordinates=int(sums["coordinates"]),
            conflict=share(sums["coordinates"] - sums["mask"], sums["coordinates"]),
            conflicting_energy=share(sums["energy"] - sums["mask_energy"], sums["energy"]),
            change=sums["change"],
            gated_change=sums["gated_change"],
        )


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The whole model and its layers, most harmed first; `loss` is the anchors' mean loss before the update."""

    loss: float
    whole: Forecast
    layers: tuple[Forecast, ...]


def preview(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    new: Sequence[Encoded],
    anchors: Sequence[Encoded],
    probes: Sequence[Encoded] = (),
    anchor_weight: float = 0.5,
) -> Preview:
    """One pass over each source, which changes nothing. Without probes the anchors are the only evidence.

    Paper: App. B.    conflict where g_hat * delta > 0;    change = g_anchor . delta
    """
    params, names = trainable(optimizer), named(model)
    layer_sums = LayerSums([layer_of(names.get(id(p), "others")) for p in params])
    shelf = Shelf()
    try:
        loss = stored(shelf, "anchors", model, params, anchors)
        if probes:
            stored(shelf, "probes", model, params, probes)
        for i, (theta, proposed) in enumerate(proposals(model, optimizer, new)):
            g_hat = g_anchor = shelf.get(f"anchors-{i}", theta.device)
            if probes:
                g_hat = blend(g_anchor, shelf.get(f"probes-{i}", theta.device), anchor_weight)
            layer_sums.add(i, masked(theta, proposed, g_hat) | first_order(theta, proposed, g_hat, g_anchor))
    finally:
        shelf.close()
    layers = [Forecast.of(name, sums) for name, sums in layer_sums.by_layer().items()]
    return Preview(
        loss=loss,
        whole=Forecast.of("whole model", layer_sums.epochs()[1]),
        layers=tuple(sorted(layers, key=lambda layer: layer.change, reverse=True)),
    )


def stored(shelf: Shelf, name: str, model: nn.Module, params: Sequence[nn.Parameter], rows: Sequence[Encoded]) -> float:
    """Store the mean gradient of these rows and return their mean loss."""
    found = MeanGradient(model=model, sources=(Source(name=name, weight=1.0, rows=rows),))(params, 0)
    for i, g in enumerate(found.vectors[0]):
        shelf.put(f"{name}-{i}", g)
    return found.losses[name]
