"""The observation of one run: which taps are active, when references are computed, and the results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from cplus.attach import Guard
from cplus.diagnostics.layers import layer_of, middle_down_projection
from cplus.diagnostics.taps import Admission, Coordinates, Geometry, References, spread
from cplus.evidence import Evidence, MeanGradient
from cplus.gates import Proposal
from cplus.loop import EpochEnded, Event, Prepared, Refreshed, Schedule
from cplus.methods import METHODS, Material

OBSERVED = ("admission", "reference", "geometry", "coordinates")
"""What is observed during a run; this needs a method with a gate."""
AUDITED = ("audit",)
"""What is measured before a run, for any method."""
NUM_SHOWN = 4


class Observation:
    """The taps of one run; `seconds` is their own time inside the updates, to be subtracted from the training's."""

    def __init__(
        self, names: Sequence[str], prepared: Prepared, *, full: Material, schedule: Schedule, seed: int
    ) -> None:
        self.taps: dict[str, Any] = {}
        self.seconds = 0.0
        self._epochs = schedule.epochs
        if not names:
            return
        guard = observable(prepared, names)
        labels = [guard.names.get(id(p), "others") for p in guard.params]
        layers = [layer_of(label) for label in labels]
        if "admission" in names:
            self.taps["admission"] = Admission(layers)
        if "reference" in names:
            self.taps["reference"] = references(guard, layers, prepared, full)
        if "coordinates" in names:
            steps = schedule.epochs * math.ceil(len(full.new) / schedule.batch_size)
            chosen = [step + 1 for step in spread(steps, NUM_SHOWN)]
            at = middle_down_projection(labels)
            size = guard.params[at].numel()
            self.taps["coordinates"] = Coordinates(labels[at], at, size, steps=chosen, seed=seed)
        if "geometry" in names:
            self.taps["geometry"] = Geometry(guard, full.new, epochs=schedule.epochs)
        for name, tap in self.taps.items():
            if name != "geometry":
                guard.observers.append(self._timed(tap))
        self._begin(1)

    def __call__(self, event: Event) -> None:
        """Follow the run: compute references between epochs, preview after each refresh of the evidence."""
        if isinstance(event, Refreshed) and "geometry" in self.taps:
            self.taps["geometry"].measure(event.epoch - 1)
        if isinstance(event, EpochEnded) and event.epoch < self._epochs:
            self._begin(event.epoch + 1)

    def report(self) -> dict[str, Any]:
        """The results of every tap as plain JSON values; removes the scratch files."""
        found = {name: tap.report() for name, tap in self.taps.items()}
        if "reference" in self.taps:
            self.taps["reference"].shelf.close()
        return found

    def _begin(self, epoch: int) -> None:
        for name in self.taps.keys() & {"admission", "reference"}:
            self.taps[name].sums.epoch = epoch
        if "reference" in self.taps:
            self.taps["reference"].refresh()

    def _timed(self, tap: Callable[[int, Proposal, Tensor], None]) -> Callable[[int, Proposal, Tensor], None]:
        def observer(position: int, proposal: Proposal, c: Tensor) -> None:
            started = time.perf_counter()
            tap(position, proposal, c)
            self.seconds += time.perf_counter() - started

        return observer


def observable(prepared: Prepared, names: Sequence[str]) -> Guard:
    """The guard to observe; refuse methods without a gate, unknown names and sharded parameters."""
    unknown = [name for name in names if name not in OBSERVED]
    if unknown:
        raise ValueError(f"unknown diagnostic {unknown[0]!r}; expected one of {', '.join(OBSERVED)}")
    guard = prepared.guard
    if guard is None or guard.gate is None:
        gated = [name for name, row in METHODS.items() if row.gate is not None]
        raise ValueError(
            f"method {prepared.method.name!r} has no gate, so {', '.join(names)} have nothing to observe; leave them "
            f"out, or choose one of {', '.join(gated)}"
        )
    if guard.where.sharded:
        raise TypeError("diagnostics need whole parameters, but these are sharded; run in one process or with DDP")
    return guard


def references(guard: Guard, layers: Sequence[str], prepared: Prepared, full: Material) -> References:
    """The tap with CPL's evidence and the method's own, both with every past row as an anchor."""
    method, cpl, model = prepared.method, METHODS["cpl"], guard.model
    if not full.rows("anchors"):
        raise ValueError("the full-data reference needs past rows, got none")
    own = method.build_evidence(model, full)
    weight = 0.0
    others: Evidence | None = own
    if isinstance(own, MeanGradient):  # linear in its sources: CPL's gradient is reused for the past rows
        weight = sum(weight for weight, kind in method.evidence if kind == "anchors")
        rest = replace(method, evidence=tuple(pair for pair in method.evidence if pair[1] != "anchors")).sources(full)
        others = MeanGradient(model=model, sources=rest) if rest else None
    return References(guard, layers, cpl=cpl.reduction(model, cpl.sources(full)), weight=weight, others=others)
