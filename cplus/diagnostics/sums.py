"""Sums collected during a run, and the shares computed from them at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cplus.diagnostics.measures import Sums, share


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
