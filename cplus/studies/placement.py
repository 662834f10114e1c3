"""The devices of a study's workers: one each where a run fits on it, as many as a run needs where it does not."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice

from cplus.experiment.settings import RunSpec
from cplus.studies.durations import PARAMETERS
from cplus.studies.study import Spec, run_title

DEVICES = "CPLUS_DEVICES"
"""Names of devices with their gigabytes, like `0:24,1:24`, in place of the GPUs that this machine reports."""
STATE = 21.0
"""Bytes per parameter of a run: weights, gradients, moments, the gate, and what an update adds for a moment."""
WEIGHTS = 4.0
"""Bytes per parameter of the whole weights, which a sharded model has while it is evaluated."""
RESERVE = 2e9
"""Bytes for the driver, the activations and the logits."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device by the name that CUDA_VISIBLE_DEVICES takes, and its free bytes."""

    name: str
    memory: float


def devices() -> tuple[Device, ...]:
    """The devices of this machine; none where it has no GPU, and runs then use the processors."""
    named = os.environ.get(DEVICES)
    return tuple(map(_read, named.split(","))) if named else _reported()


def _read(text: str) -> Device:
    name, _, gigabytes = text.strip().partition(":")
    try:
        return Device(name=name, memory=float(gigabytes) * 1e9)
    except ValueError as error:
        raise ValueError(f"{DEVICES} must be like 0:24,1:24 (name and gigabytes), got {text.strip()!r}") from error


def _reported() -> tuple[Device, ...]:
    """What nvidia-smi reports, in the order of CUDA_VISIBLE_DEVICES where that is set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    tool = shutil.which("nvidia-smi")
    if tool is None or visible == "":
        return ()
    query = [tool, "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return reported(done.stdout if done.returncode == 0 else "", visible)


def reported(table: str, visible: str | None) -> tuple[Device, ...]:
    """The devices of nvidia-smi's table: their free mebibytes by index and by UUID.

    >>> [device.name for device in reported("0, GPU-a, 1000\\n1, GPU-b, 2000\\n", "1")]
    ['1']
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.strip()]
    free = {name: float(row[2]) * 2**20 for row in rows for name in row[:2]}
    names = [row[1] for row in rows] if visible is None else [name.strip() for name in visible.split(",")]
    return tuple(Device(name=name, memory=free[name]) for name in names if name in free)


def need(spec: Spec, parts: int) -> float:
    """Bytes of a run on each of so many devices.

    >>> about = {"task": "", "interface": "letter", "method": "sft", "seed": 0, "num_anchors": 8, "num_probes": 8}
    >>> spec = RunSpec(model="qwen3-4b", **about)
    >>> round(need(spec, 1) / 1e9), round(need(spec, 2) / 1e9)
    (86, 60)
    """
    parameters = PARAMETERS.get(spec.model, 1e9)
    return RESERVE + parameters * (STATE / parts + (WEIGHTS if parts > 1 else 0.0))


def width(spec: Spec, found: Sequence[Device]) -> int:
    """The smallest number of devices that a run fits on; one that fits on none is refused."""
    limit = len(found) if isinstance(spec, RunSpec) else 1
    for parts in range(1, limit + 1):
        if sum(device.memory >= need(spec, parts) for device in found) >= parts:
            return parts
    largest = max(device.memory for device in found)
    raise ValueError(
        f"{run_title(spec)}: needs {need(spec, limit) / 1e9:.0f} GB on each of {limit} devices, and the largest has "
        f"{largest / 1e9:.0f} GB free; use larger or more devices, or a smaller model"
    )


def assign(found: Sequence[Device], workers: int, spec: Spec) -> list[tuple[Device, ...]]:
    """The devices of each worker, for runs as large as this one: workers share a device as far as its memory suffices.

    >>> two = [Device(name=name, memory=80e9) for name in "01"]
    >>> about = {"task": "", "interface": "letter", "method": "sft", "seed": 0, "num_anchors": 8, "num_probes": 8}
    >>> [[device.name for device in own] for own in assign(two, 3, RunSpec(model="qwen3-1.7b", **about))]
    [['0'], ['1'], ['0']]
    """
    parts = width(spec, found)
    fitting = [device for device in found if device.memory >= need(spec, parts)]
    if parts > 1:
        groups = [tuple(fitting[i : i + parts]) for i in range(0, len(fitting) - parts + 1, parts)]
        return groups[:workers]
    return list(islice(_rounds(fitting, need(spec, 1)), workers))


def _rounds(found: Sequence[Device], bytes_each: float) -> Iterable[tuple[Device, ...]]:
    """Every device once, then again those that have room for one more, and so on."""
    for worker in count(1):
        room = [device for device in found if device.memory >= worker * bytes_each]
        if not room:
            return
        yield from ((device,) for device in room)


def by_width(specs: Iterable[Spec], found: Sequence[Device]) -> dict[int, list[Spec]]:
    """The runs by the number of devices they take; without devices all of them take one place each."""
    groups: dict[int, list[Spec]] = {}
    for spec in specs:
        groups.setdefault(width(spec, found) if found else 1, []).append(spec)
    return groups


def teams(
    found: Sequence[Device], workers: int, specs: Iterable[Spec]
) -> list[tuple[list[Spec], list[tuple[Device, ...]]]]:
    """Runs that take equally many devices, fewest first, each with the places of the workers that do them."""
    phases = []
    for _, own in sorted(by_width(specs, found).items()):
        places: list[tuple[Device, ...]] = [()] * workers
        if found:
            places = assign(found, workers, max(own, key=lambda spec: need(spec, 1)))
        phases.append((own, places[: len(own)]))
    return phases


def largest_team(found: Sequence[Device], workers: int, specs: Iterable[Spec]) -> int:
    """The largest number of workers that work at the same time."""
    return max(len(places) for _, places in teams(found, workers, specs))
