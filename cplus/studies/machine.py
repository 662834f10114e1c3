"""A run on a described machine: bytes by part, the number of devices it takes, and its time; no torch.

The bytes are the ones of `cplus.job.fits`, from the paper models' published shapes; a test holds the gate's against
those that a guard measures. The base model is in the host's memory while its copy trains.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cplus.cost import TRAINING_RESERVE, activation_bytes
from cplus.experiment.settings import RunSpec
from cplus.methods import Method
from cplus.selection import method
from cplus.studies.durations import PARAMETERS, flops, updates
from cplus.studies.study import Spec

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
    spare = room - (4 + TRAINING_RESERVE) * size  # as `cplus.offload.storage` counts it
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
