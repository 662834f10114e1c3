"""Estimated time, memory and devices of runs, here or on a described machine; no torch."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any

from cplus.base.cost import TRAINING_RESERVE, activation_bytes
from cplus.lab.study import Result, Spec, run_title
from cplus.methods.table import Method, method
from cplus.models.names import PACKAGED
from cplus.training.settings import RunSpec

# Estimated time and memory of runs: from similar finished runs, else from their FLOPs at an assumed speed.


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
SPEED = {True: 50e9, False: 60e12}
"""Assumed FLOPs per second: for small models on one core, as the toy models reach; for large ones on a GPU."""
OVERHEAD = 1.5


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


def seconds(spec: Spec, known: Sequence[Result], speed: float | None = None) -> float:
    """The estimated time of a run: its FLOPs at the median rate of similar finished runs, else at this speed.

    `speed` is FLOPs per second as measured on the device; without it an assumed one is used.
    """
    own = flops(spec)
    rates: list[float] = [
        r.environment["wall_seconds"] / flops(r.spec) for r in similar(spec, known) if "wall_seconds" in r.environment
    ]
    if rates:
        return own * statistics.median(rates)
    return OVERHEAD + own / (speed or SPEED[PARAMETERS.get(spec.model, 1e9) < 200e6])


def similar(spec: Spec, known: Sequence[Result]) -> list[Result]:
    """The finished runs of the same model and kind, of the same method if there are any."""
    found = [r for r in known if r.spec.model == spec.model and type(r.spec) is type(spec)]
    return [r for r in found if r.spec.method == spec.method] or found


def memory(spec: Spec) -> float:
    """Bytes per worker: interpreter and libraries, then weights, gradients, moments, copy, evidence and average."""
    return 0.7e9 + 32 * PARAMETERS.get(spec.model, 1e9)


def workers_that_fit(workers: int, specs: Sequence[Spec], available: float) -> int:
    """The number of workers that fit into the available bytes, at least one.

    >>> spec = RunSpec(model="toy", task="", interface="cloze", method="sft", seed=0, num_anchors=0, num_probes=0)
    >>> workers_that_fit(8, [], 1e9), workers_that_fit(8, [spec], 3e9)
    (8, 4)
    """
    need = max((memory(spec) for spec in specs), default=0.0)
    return workers if not need else max(1, min(workers, int(available // need)))


# A run on a described machine: bytes by part, the number of devices it takes, and its time; no torch.
#
# The bytes are the ones of `cplus.jobs.memory`, from the paper models' published shapes; a test holds the gate's
# against those that a guard measures. The base model is in the host's memory while its copy trains.


USABLE = 0.94
"""The share of a device's memory that a process can fill."""
SHAPES = {
    "qwen3-0.6b": (28, 1024, 3072, 151_936),
    "qwen3-1.7b": (28, 2048, 6144, 151_936),
    "qwen3-4b": (36, 2560, 9728, 151_936),
    "gemma-2-2b-it": (26, 2304, 9216, 256_000),
    "phi-3.5-mini": (32, 3072, 8192, 32_064),
}
"""Layers, width, inner width and vocabulary of the paper's models."""
WHOLE = ("norm-matched", "shuffled", "mofo")
"""Methods whose gate compares coordinates with one another, so that their weights cannot be sharded."""
STATED = {"flops": 60e12, "bandwidth": 1.5e12, "bus": 25e9}
"""Stated for an 80 GB device: FLOPs per second of its passes, bytes per second of its memory and of its bus."""
CHECKPOINTED = 8
"""Gradient checkpointing keeps one vector per layer in place of about this many times as much."""
UPDATE_BYTES = 60
"""Bytes per parameter that an update of one row moves: the weights' casts, gradients, moments, gate and average."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices of so many gigabytes each."""

    devices: int
    gigabytes: float

    @staticmethod
    def read(text: str) -> Machine:
        """Read `8x80`.

        >>> Machine.read("8x80")
        Machine(devices=8, gigabytes=80.0)
        """
        found = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)", text.strip().lower())
        if found is None or float(found[2]) <= 0:
            raise ValueError(f"--machine must be DEVICESxGIGABYTES like 8x80, got {text!r}")
        return Machine(devices=int(found[1]), gigabytes=float(found[2]))


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Bytes of a run on one device, by what they are for."""

    weights: float
    gradients: float
    moments: float
    gate: float
    """Signs, average and the copy that an update compares with."""
    vectors: float
    """A projection's vectors, or a teacher's outputs."""
    passes: float
    """Half-precision copies of the weights and the activations."""

    def on(self, devices: int) -> float:
        """Bytes on each of so many devices: the state is split, and an evaluation needs the whole weights."""
        state = self.weights + self.gradients + self.moments + self.gate + self.vectors
        return state + self.passes if devices == 1 else state / devices + max(self.passes, 1.5 * self.weights)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A run on a machine: how many devices it takes, bytes on each, and its estimated time."""

    devices: int
    bytes: float
    seconds: float
    on_host: float = 0.0
    """Bytes of a projection's vectors in the host's memory."""
    checkpointed: bool = False
    """Whether activations are computed again instead of kept."""

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        host = f" + {self.on_host / 1e9:.0f} GB on the host" if self.on_host else ""
        again = ", checkpointed" if self.checkpointed else ""
        return f"{self.devices} x {self.bytes / 1e9:5.1f} GB{host}{again}  {self.seconds / 3600:6.2f} h"


def parts(spec: Spec, *, vectors_on_device: float = 4.0, checkpointed: bool = False) -> RunParts:
    """Bytes by part on one device; a projection's vectors take so many bytes per coordinate there.

    With gradient checkpointing one layer's casts and about an eighth of the activations are held.
    """
    row, size = row_of(spec), PARAMETERS.get(spec.model, 1e9)
    half = spec.compute_dtype == "bfloat16"
    layers, width, inner, vocabulary = SHAPES.get(spec.model, (24, 1024, 4096, 50_000))
    less = CHECKPOINTED if checkpointed else 1
    activations = activation_bytes(layers=layers, width=width, inner=inner, vocabulary=vocabulary)
    held = vectors_on_device * num_vectors(row, spec) * size
    if row.name == "distillation":
        held += 4.0 * spec.num_anchors * vocabulary
    return RunParts(
        weights=4 * size,
        gradients=4 * size,
        moments=(8 if spec.optimizer == "adamw" else 0) * size,
        gate=gate_bytes(row) * size,
        vectors=held,
        passes=(2 * size / (layers if checkpointed else 1) + activations / 2 / less) if half else activations / less,
    )


def row_of(spec: Spec) -> Method:
    """The method's row with the run's settings."""
    return spec.settings.row if isinstance(spec, RunSpec) else method(spec.method)


def num_vectors(row: Method, spec: Spec) -> int:
    """The number of gradients that a projection keeps."""
    if row.projection is None:
        return 0
    return spec.num_anchors if row.vectors == "one per anchor" else 1


def gate_bytes(row: Method) -> float:
    """Bytes per parameter of a method's gate on a GPU: evidence, average, remembered evidence, and a copy.

    Evidence is kept as signs in two bits, unless it says otherwise.
    """
    if row.gate is None:
        return 0.0
    return (
        (getattr(row.reduction, "kept_bytes", 0.25) if row.evidence else 0.0)
        + (4.0 if row.beta else 0.0)
        + (4.0 if row.memory else 0.0)
        + 4.0
    )


def can_be_sharded(spec: Spec) -> bool:
    """Whether several devices can share a run: the engine shards runs whose method needs no whole tensors."""
    row = row_of(spec)
    whole = row.projection is not None or row.memory > 0 or row.name in WHOLE
    plain = row.after is None and row.adapter is None and row.objective.bytes_per_parameter == 0
    return isinstance(spec, RunSpec) and not spec.diagnose and not whole and plain


def place(spec: Spec, machine: Machine) -> Placed:
    """The smallest number of the machine's devices that a run fits on; a run that fits on none is refused.

    Gradient checkpointing is tried before more devices.
    """
    room, count = USABLE * machine.gigabytes * 1e9, num_vectors(row_of(spec), spec)
    size = PARAMETERS.get(spec.model, 1e9)
    spare = room - (4 + TRAINING_RESERVE) * size  # as `cplus.core.evidence.storage` counts it
    each = next((each for each in (4.0, 2.0) if count * each * size <= spare), 0.0)
    most = machine.devices if can_be_sharded(spec) else 1
    for devices in range(1, most + 1):
        for checkpointed in (False, True):
            need = parts(spec, vectors_on_device=each, checkpointed=checkpointed).on(devices)
            if need <= room:
                host = 2.0 * count * size if count and not each else 0.0
                time = stated_seconds(spec, on_host=host, checkpointed=checkpointed) / devices
                return Placed(devices=devices, bytes=need, seconds=time, on_host=host, checkpointed=checkpointed)
    least = parts(spec, vectors_on_device=0.0, checkpointed=True).on(most)
    raise ValueError(
        f"{spec.method} of {spec.model} needs {least / 1e9:.0f} GB on each of {most} devices, and those of "
        f"{machine.gigabytes:g} GB offer {room / 1e9:.0f}; describe a larger machine"
    )


def stated_seconds(spec: Spec, *, on_host: float = 0.0, checkpointed: bool = False) -> float:
    """The time at the stated speed of an 80 GB device: passes by FLOPs, updates by the bytes they move.

    Vectors on the host pass over the bus twice at every update: for the inner products, and to be subtracted. With
    checkpointing the forward passes are computed twice.
    """
    each = UPDATE_BYTES * PARAMETERS.get(spec.model, 1e9) / STATED["bandwidth"] + 2 * on_host / STATED["bus"]
    passes = flops(spec) * (4 / 3 if checkpointed else 1)
    return passes / STATED["flops"] + updates(spec) * each


def listed(specs: Sequence[Spec], machine: Machine) -> list[tuple[Spec, Placed | str]]:
    """Each run with its place on the machine, or with the reason why it has none."""
    found: list[tuple[Spec, Placed | str]] = []
    for spec in specs:
        try:
            found.append((spec, place(spec, machine)))
        except ValueError as error:
            found.append((spec, str(error)))
    return found


def hours(found: Sequence[tuple[Spec, Placed | str]], machine: Machine) -> float:
    """Hours of all runs if the devices are never idle."""
    used = sum(each.devices * each.seconds for _, each in found if isinstance(each, Placed))
    return used / machine.devices / 3600


# The devices of a study's workers: one each where a run fits on it, as many as a run needs where it does not.


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
