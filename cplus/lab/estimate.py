"""Estimated time, memory and devices of runs, here or on a described machine; no torch."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cplus.lab.records import Result, Spec
from cplus.lab.study import run_title
from cplus.lab.summaries import grouped
from cplus.methods.table import Method, method
from cplus.models.names import PACKAGED
from cplus.training.settings import RunSpec

# Time: from similar finished runs, else from FLOPs at a measured or stated speed.


PARAMETERS = {
    "toy-s": 183e3,
    "toy": 602e3,
    "toy-l": 2.64e6,
    **{alias: float(model.parameters) for alias, model in PACKAGED.items()},
    "qwen3-0.6b": 596e6,
    "qwen3-1.7b": 1.72e9,
    "qwen3-4b": 4.02e9,
    "gemma-2-2b-it": 2.61e9,
    "phi-3.5-mini": 3.82e9,
}
TOKENS = {"cloze": 14, "letter": 110, "freeform": 60}
NEW_ROWS = 680  # assumed if a spec trains on all wrong rows
PAST_ROWS = 2000  # assumed if a spec evaluates all past rows
OVERHEAD = 1.5
STATED = {"flops": 60e12, "bandwidth": 1.5e12}
"""Stated for an 80 GB device: FLOPs per second of its passes and bytes per second of its memory."""
UPDATE_BYTES = 60
"""Bytes per parameter that an update of one row moves: the weights' casts, gradients, moments, gate and average."""


def flops(spec: Spec) -> float:
    """FLOPs of a run: forward and backward passes of training and evidence, forward passes of evaluation."""
    new = spec.num_new or NEW_ROWS
    trained = new * (2 if "replay" in spec.method else 1) * spec.epochs
    evidence = (spec.num_anchors + spec.num_probes) * spec.epochs
    if method(spec.method).refresh == 1:  # at every update
        evidence = spec.num_anchors * updates(spec)
    evaluated = 4 * PAST_ROWS
    if isinstance(spec, RunSpec):
        evaluated = (spec.num_past or PAST_ROWS) + new + len(spec.external) * (spec.external_limit or PAST_ROWS)
        evaluated *= 1 + (spec.epochs // spec.evaluate_every if spec.evaluate_every else 0)
        evidence = (evidence + PAST_ROWS * spec.epochs * spec.all_anchors) // spec.parts
        if {"reference", "audit"} & set(spec.diagnose):
            evidence += 2 * PAST_ROWS * (spec.epochs if "reference" in spec.diagnose else 4)
    stages = 1 if isinstance(spec, RunSpec) else len(spec.tasks)
    choices = 4 if spec.interface == "cloze" else 1
    size = PARAMETERS.get(spec.model, 1e9) * TOKENS[spec.interface]
    return stages * size * (6 * (trained + evidence) + 2 * evaluated * choices / 2)


def updates(spec: Spec) -> int:
    """The number of updates of a run."""
    stages = 1 if isinstance(spec, RunSpec) else len(spec.tasks)
    return stages * spec.epochs * -(-(spec.num_new or NEW_ROWS) // spec.batch_size)


def here(specs: Sequence[Spec], known: Sequence[Result]) -> tuple[list[float], str]:
    """The seconds of each run by similar finished ones, else by the speed measured on this device; and the basis."""
    timed = [r for r in known if "wall_seconds" in r.environment]
    rates = []  # seconds per FLOP of runs of the same model and kind, and of the same method if there are any
    for spec in specs:
        found = [r for r in timed if r.spec.model == spec.model and type(r.spec) is type(spec)]
        found = [r for r in found if r.spec.method == spec.method] or found
        rates.append([r.environment["wall_seconds"] / flops(r.spec) for r in found])
    speed, device = (0.0, "") if all(rates) else measured_speed()
    times = [
        flops(spec) * statistics.median(own) if own else OVERHEAD + flops(spec) / speed
        for spec, own in zip(specs, rates, strict=True)
    ]
    bases = ["finished runs"] if any(rates) else []
    if not all(rates):
        bases.append(f"{speed / 1e9:,.0f} GFLOP per second, measured on {device}")
    return times, ", others from ".join(bases)


def measured_speed() -> tuple[float, str]:
    """FLOPs per second of a layer's products for one row of the paper, and the device; more rows at once do more."""
    import torch
    from torch.utils.benchmark import Timer

    from cplus import models

    where = models.choose_device("auto")
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    row, up = (torch.randn(shape, device=where, dtype=dtype) for shape in ((110, 512), (512, 2048)))
    threads = torch.get_num_threads()
    timer = Timer("row @ up @ up.T", globals={"row": row, "up": up}, num_threads=threads)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"{threads} threads"
    return 2 * 2 * row.numel() * up.shape[1] / timer.blocked_autorange().median, name


def workers_that_fit(workers: int, specs: Sequence[Spec], available: float) -> int:
    """The number of workers that fit into the host's available bytes, at least one.

    A worker has interpreter and libraries, then weights, gradients, moments, copy, evidence and average.

    >>> spec = RunSpec(model="toy", task="", interface="cloze", method="sft", seed=0, num_anchors=0, num_probes=0)
    >>> workers_that_fit(8, [spec], 3e9)
    4
    """
    most = max((0.7e9 + 32 * PARAMETERS.get(spec.model, 1e9) for spec in specs), default=0.7e9)
    return max(1, min(workers, int(available // most)))


# Devices: those of this machine or of a described one, and how many of them a run takes.


USABLE = 0.94
"""The share of a device's memory that a process can fill."""
RESERVE = 2e9
"""Bytes for the driver, the activations (computed again where memory is short) and the logits."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device by the name that CUDA_VISIBLE_DEVICES takes, and its bytes."""

    name: str
    memory: float


def devices() -> tuple[Device, ...]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves; without any, runs use the processors."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    sizes = [USABLE * torch.cuda.get_device_properties(index).total_memory for index in range(count)]
    return tuple(Device(name=name, memory=size) for name, size in zip(names, sizes, strict=False))


def described(text: str) -> tuple[Device, ...]:
    """The devices of a machine that is described like `8x80`: eight of 80 GB each."""
    found = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)", text.strip().lower())
    if found is None or float(found[2]) <= 0:
        raise ValueError(f"--machine must be DEVICESxGIGABYTES like 8x80, got {text!r}")
    return (Device(name="", memory=USABLE * float(found[2]) * 1e9),) * int(found[1])


def row_of(spec: Spec) -> Method:
    """The method's row with the run's settings."""
    return spec.settings.row if isinstance(spec, RunSpec) else method(spec.method)


def need(spec: Spec, count: int) -> float:
    """Bytes of a run on each of so many devices: the state is split, and an evaluation needs the whole weights.

    A projection's vectors are left out: where the device has no room for them they are in the host's memory.

    >>> about = {"task": "", "interface": "letter", "method": "sft", "seed": 0, "num_anchors": 8, "num_probes": 8}
    >>> spec = RunSpec(model="qwen3-4b", **about)
    >>> round(need(spec, 1) / 1e9), round(need(spec, 2) / 1e9)
    (66, 50)
    """
    weights, gradients, moments, row, gate = 4.0, 4.0, 8.0 * (spec.optimizer == "adamw"), row_of(spec), 0.0
    if row.gate is not None:  # the evidence, by default signs in two bits, average and memory, and the step's copy
        kept = getattr(row.reduction, "bytes_per_parameter", 0.0) or 0.25
        gate = kept * bool(row.evidence) + 4.0 * bool(row.beta) + 4.0 * bool(row.memory) + 4.0
    state = (weights + gradients + moments + gate) / count + (weights if count > 1 else 0.0)
    return RESERVE + PARAMETERS.get(spec.model, 1e9) * state


def width(spec: Spec, found: Sequence[Device]) -> int:
    """The smallest number of devices that a run fits on, 1 where there are none; one that fits on none is refused.

    Several devices can share a run whose method needs no whole tensors.
    """
    from cplus.training.sharding import needs_whole

    whole = not isinstance(spec, RunSpec) or spec.diagnose or needs_whole(row_of(spec), spec.seed)
    limit = 1 if whole else max(1, len(found))
    smallest = min((device.memory for device in found), default=math.inf)
    for count in range(1, limit + 1):
        if need(spec, count) <= smallest:
            return count
    raise ValueError(
        f"{run_title(spec)}: needs {need(spec, limit) / 1e9:.0f} GB on each of {limit} devices, and the smallest has "
        f"{smallest / 1e9:.0f} GB; use larger or more devices, or a smaller model"
    )


def teams(
    found: Sequence[Device], workers: int, specs: Iterable[Spec]
) -> list[tuple[list[Spec], list[Sequence[Device]]]]:
    """Runs that take equally many devices, fewest first, each with the places of the workers that do them.

    Workers of runs that take one device share it as far as its memory suffices.
    """
    phases = []
    for count, own in sorted(grouped(specs, lambda spec: width(spec, found)).items()):
        places: list[Sequence[Device]] = [()] * workers
        if found:
            most = max(need(spec, count) for spec in own)
            sharing = int(min(device.memory for device in found) // most) if count == 1 else 1
            places = [found[i : i + count] for i in range(0, len(found) - count + 1, count)] * sharing
        phases.append((own, places[: min(workers, len(own))]))
    return phases


def on_machine(specs: Sequence[Spec], machine: Sequence[Device]) -> tuple[list[dict[str, Any]], float]:
    """For each run its devices, bytes on each and seconds, or why it is refused; and hours if no device is idle."""
    rows: list[dict[str, Any]] = []
    used = 0.0
    for spec in specs:
        try:
            count = width(spec, machine)
        except ValueError as error:
            rows.append({"refused": str(error)})
            continue
        moved = updates(spec) * UPDATE_BYTES * PARAMETERS.get(spec.model, 1e9)
        time = flops(spec) / STATED["flops"] + moved / STATED["bandwidth"]
        used += time
        rows.append({"devices": count, "bytes": need(spec, count), "seconds": time / count})
    return rows, used / len(machine) / 3600
