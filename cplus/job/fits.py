"""Which devices a job fits on, and with which settings: bytes by part, from the model's configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cplus.adapters import Lora
from cplus.experiment.driver import STATE_BYTES
from cplus.job.memory import CHECKPOINTED, ModelSize, giga, guard_bytes, model_size
from cplus.job.settings import AdaptConfig
from cplus.methods import Method
from cplus.models import four_bit

MACHINES = ((1, 24), (1, 48), (1, 80), (2, 80), (8, 80))
"""Number of devices and the gigabytes of each."""
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
USABLE = 0.94
"""The share of a device's memory that a process can fill; the rest is the driver's, or lost between blocks."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes of a job on one device, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    gate: int
    """Evidence and average, and what an update adds for a moment."""
    objective: int
    """What the method itself holds, like a copy of the base model."""
    activations: int

    @property
    def total(self) -> int:
        """All of it at the peak."""
        return sum(asdict(self).values())

    def over(self, devices: int) -> Parts:
        """The largest share of one of several devices: the state is sharded, and a layer's weights are whole in use."""
        if devices == 1:
            return self
        split = {name: value // devices for name, value in asdict(self).items() if name != "activations"}
        # Evaluations see the whole weights, without gradients and activations of training.
        return Parts(**{**split, "weights": self.weights // devices}, activations=max(self.activations, self.weights))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a machine needs to be able to do the job; `settings` is None if nothing that was tried fits."""

    devices: int
    gigabytes: int
    settings: str | None
    parts: Parts

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        return {**asdict(self), "total": self.parts.total}

    def __str__(self) -> str:
        where = f"{self.devices} x {self.gigabytes} GB"
        if self.settings is None:
            return f"{where}: no, the least is {giga(self.parts.total)} GB each"
        return f"{where}: {self.settings or 'as chosen'}, {giga(self.parts.total)} GB each"


def job_parts(config: AdaptConfig, method: Method, size: ModelSize, num_anchors: int) -> Parts:
    """Bytes by part in one process, whichever device; the step of a GPU works on copies, so they are counted."""
    kept, step = guard_bytes(config, method, num_anchors, size.trainable, copies=True)
    activations = size.activation_bytes // (CHECKPOINTED if config.gradient_checkpointing else 1)
    return Parts(
        weights=4 * (size.parameters - size.packed) + round(four_bit.BYTES_PER_WEIGHT * size.packed),
        gradients=4 * size.trainable,
        optimizer=STATE_BYTES[config.optimizer] * size.trainable,
        gate=round((kept + step) * size.trainable),
        objective=round(method.bytes_per_parameter * size.trainable)
        + (4 * (size.parameters - size.trainable) if method.after is not None else 0),
        activations=activations,
    )


def _tried(config: AdaptConfig) -> Iterator[tuple[str, AdaptConfig]]:
    """The settings as they are, then with less and less memory; adapters are tried where they can be trained."""
    yield "", config
    light = config.model_copy(update={"gradient_checkpointing": True})
    if not config.gradient_checkpointing:
        yield "--gradient-checkpointing", light
    if config.settings().row.beta is not None and config.ema is None:
        small = light.model_copy(update={"ema": "uint8"})
        yield "--gradient-checkpointing --ema uint8", small
        if config.optimizer == "adamw" and find_spec("bitsandbytes") is not None:
            text = "--gradient-checkpointing --ema uint8 --optimizer adamw8bit"
            yield text, small.model_copy(update={"optimizer": "adamw8bit"})
    if config.lora is None and find_spec("peft") is not None:
        few = light.model_copy(update={"lora": Lora(r=16)})
        yield "--gradient-checkpointing --lora r=16", few
        if config.load != four_bit.NAME:
            yield "--gradient-checkpointing --lora r=16 --load 4bit", few.model_copy(update={"load": four_bit.NAME})


def fits(config: AdaptConfig, method: Method, where: Path | str, size: ModelSize, num_anchors: int) -> list[Fit]:
    """For each machine the first settings that fit it; `size` is the model's with the settings as they are."""
    tried = []
    for text, changed in _tried(config):
        same = (changed.lora, changed.load) == (config.lora, config.load)
        own = size if same else model_size(changed, method, where)
        row = replace(method, ema=changed.ema or method.ema)
        tried.append((text, changed, job_parts(changed, row, own, num_anchors)))
    found = []
    for devices, gigabytes in MACHINES:
        best = Fit(devices=devices, gigabytes=gigabytes, settings=None, parts=tried[0][2].over(devices))
        for text, changed, whole in tried:
            if devices > 1 and changed.load == four_bit.NAME:
                continue  # weights in 4 bits cannot be sharded
            parts = whole.over(devices)
            here = Fit(devices=devices, gigabytes=gigabytes, settings=None, parts=parts)
            if parts.total <= USABLE * gigabytes * 1e9:
                best = replace(here, settings=text)
                break
            best = min(best, here, key=lambda fit: fit.parts.total)
        found.append(best)
    return found


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """What a job needs, part by part, and which devices it fits on; the whole plan of one that cannot run here."""

    config: AdaptConfig
    size: ModelSize
    reason: str
    parts: Parts
    devices: tuple[Fit, ...]

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "settings": self.config.model_dump(mode="json"),
            "size": asdict(self.size),
            "reason": self.reason,
            "bytes": {**asdict(self.parts), "total": self.parts.total},
            "devices": [fit.row() for fit in self.devices],
        }

    def lines(self) -> list[str]:
        """The plan in words."""
        return [
            f"model      {self.config.model}: {self.size.parameters:,} parameters, {self.size.trainable:,} trained",
            *self.device_lines(),
            *([f"here       {self.reason}"] if self.reason else []),
        ]

    def device_lines(self) -> list[str]:
        """Bytes by part, and one line for each machine."""
        first = self.devices[0]
        if first.settings == "":
            fits_all = f"{first.gigabytes} GB and more: as chosen, {giga(self.parts.total)} GB"
            return [f"devices    {fits_all}"]
        each = ", ".join(f"{name} {value / self.size.parameters:.2f}" for name, value in asdict(self.parts).items())
        return [
            f"bytes      {giga(self.parts.total)} GB on one device; per parameter: {each}",
            *(f"devices    {fit}" for fit in self.devices),
        ]


def has_weights(where: Path | str) -> bool:
    """Whether a model's folder holds weights; one that is not a folder is taken to have them."""
    return not isinstance(where, Path) or not where.is_dir() or any(any(where.glob(kind)) for kind in WEIGHTS)


def device_plan(
    config: AdaptConfig,
    method: Method,
    where: Path | str,
    num_anchors: int,
    reason: str = "",
    size: ModelSize | None = None,
) -> DevicePlan:
    """What fits where; `reason` says why the job cannot run here."""
    size = size or model_size(config, method, where)
    return DevicePlan(
        config=config,
        size=size,
        reason=reason,
        parts=job_parts(config, method, size, num_anchors),
        devices=tuple(fits(config, method, where, size, num_anchors)),
    )
