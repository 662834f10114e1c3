"""A model's size and a job's bytes in memory and on disk, and the devices it fits on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cplus import models
from cplus.base.cost import activation_bytes
from cplus.base.environment import free_memory
from cplus.core.evidence import Evidence, Reference, Remembered
from cplus.core.gates import Gate
from cplus.core.guard import Guard
from cplus.core.optim import AdamW
from cplus.distributed import processes as world
from cplus.jobs.settings import AdaptConfig
from cplus.methods.adapters import Lora
from cplus.methods.repair import BYTES_PER_PARAMETER
from cplus.methods.table import Method
from cplus.models import loading
from cplus.training.driver import STATE_BYTES, adapted, build_optimizer

# A model's size and a job's bytes in memory and on disk, computed before anything large is loaded.


CHECKPOINTED = 8
"""Gradient checkpointing keeps one vector per layer in place of about this many times as much."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model's size, from its configuration alone."""

    parameters: int
    trainable: int
    stored_dtype: str
    activation_bytes: int
    """Estimate for one pass of the largest size."""
    packed: int = 0
    """Parameters held in 4 bits."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes a job holds and writes; `held` is certain, `peak` adds an estimate of the activations."""

    held: int
    peak: int
    available: int
    kept_bytes_per_parameter: float
    step_bytes_per_parameter: float
    disk: int
    free: int


def model_size(config: AdaptConfig, method: Method, where: Path | str) -> ModelSize:
    """Count the parameters on the meta device: no weight is read."""
    options = {"trust_remote_code": config.trust_remote_code, "local_files_only": isinstance(where, Path)}
    try:
        found = AutoConfig.from_pretrained(where, revision=config.revision, **options)
    except OSError as error:
        raise ValueError(f"could not read the configuration of {config.model!r}: {error}") from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(found, trust_remote_code=config.trust_remote_code)
        packed = loading.packable(model) if config.load == loading.NAME else 0
        model = _adapted(config, method, model)
    text = found.get_text_config()
    if config.max_length is not None and config.max_length > text.max_position_embeddings:
        raise ValueError(
            f"max_length must be at most the context window of {config.model}, {text.max_position_embeddings} tokens, "
            f"got {config.max_length}"
        )
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return ModelSize(
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        stored_dtype=str(getattr(found, "dtype", None) or "float32").removeprefix("torch."),
        activation_bytes=activation_bytes(
            layers=text.num_hidden_layers, width=text.hidden_size, inner=inner, vocabulary=text.vocab_size
        ),
        packed=packed,
    )


def _adapted(config: AdaptConfig, method: Method, model: nn.Module) -> nn.Module:
    """The model as it trains; adapters that are computed from the weights count as training all weights."""
    try:
        found: nn.Module = adapted(replace(config.settings(), gradient_checkpointing=False), method, model)
        return found
    except NotImplementedError:  # no weight is read here
        return model


def footprint(config: AdaptConfig, method: Method, size: ModelSize, num_anchors: int) -> Footprint:
    """The job's bytes in memory and on disk."""
    kept, step = guard_bytes(config, method, num_anchors, size.trainable)
    states = STATE_BYTES[config.optimizer]
    gradient = 4
    objective = method.bytes_per_parameter
    weights = 4 * (size.parameters - size.packed) + round(loading.BYTES_PER_WEIGHT * size.packed)
    held = weights + round(size.trainable * (gradient + states + kept + step + objective))
    if method.after is not None:  # of frozen weights too, because adapters are merged into them
        held += 4 * (size.parameters - size.trainable)
    if config.repair:
        held = max(held, BYTES_PER_PARAMETER * size.parameters)
    device = models.choose_device(config.device)
    held = on_this_machine(held, weights, config.sharding, device)
    checkpoint = round(size.trainable * (4 + states + kept))
    # Merged, packed weights are float32 again.
    expanded = 4 * size.packed if config.lora is not None and config.lora.merge else 0
    activations = size.activation_bytes // (CHECKPOINTED if config.gradient_checkpointing else 1)
    # A checkpoint is written beside the one it replaces.
    sums = 8 * size.parameters if config.repair else 0
    disk = 2 * checkpoint + 4 * size.parameters + sums + (64 << 20)
    return Footprint(
        held=held,
        peak=held + max(activations, expanded),
        available=available(device),
        kept_bytes_per_parameter=kept + objective,
        step_bytes_per_parameter=step,
        disk=disk,
        free=disk_free(config.out),
    )


def checkpointed(need: Footprint, size: ModelSize) -> int:
    """Bytes at the peak if activations are computed twice."""
    return need.peak - size.activation_bytes + size.activation_bytes // CHECKPOINTED


def on_this_machine(held: int, weights: int, sharding: str, device: torch.device) -> int:
    """Bytes on one GPU, or in the memory that all processes on this machine share.

    Shards are a part of everything, and the whole weights while the model is evaluated.
    """
    processes = world.started()[1]
    if processes == 1:
        return held
    own = held if sharding == "ddp" else held // processes + weights
    return own if device.type == "cuda" else own * world.neighbours()


def check_packed(path: Path, device: torch.device) -> None:
    """Refuse a GGUF file that is too big to unpack: its first use writes a float32 folder."""
    need = 4 * sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
    if need > (free := available(device)):
        raise ValueError(
            f"{path}: unpacked it needs {giga(need)} GB, but {giga(free)} GB are free; use a smaller model"
        )


def guard_bytes(
    config: AdaptConfig, method: Method, num_anchors: int, trainable: int, *, copies: bool = False
) -> tuple[float, float]:
    """Bytes per parameter held from step to step, and during a step on top.

    Measured on a small layer; whether the optimizer's step and the gate will be one pass, which copies no parameters,
    is decided by the size of the real model; with `copies` it will not be, as on a GPU.
    """
    if not method.guarded:
        return 0.0, 0.0
    layer = nn.Linear(64, 64, bias=False, device=models.choose_device(config.device))
    optimizer = build_optimizer(replace(config.settings(), lr=1e-3), layer)  # the rate takes no memory
    gate = method.build_gate(0)
    evidence: Evidence | None = None
    if method.evidence:
        evidence = _Ones(num_anchors if method.vectors == "one per anchor" else 1, kept_dtype(gate))
        evidence = Remembered(evidence, method.memory) if method.memory else evidence
    with Guard(optimizer, layer, evidence=evidence, gate=gate, projection=method.projection) as guard:
        if evidence is not None:
            guard.refresh()
        layer(torch.ones(1, 64, device=layer.weight.device)).sum().backward()
        optimizer.step()
        held = guard.nbytes, guard.step_nbytes
        one_pass = isinstance(optimizer, AdamW) and guard.compiles(trainable)
    return held[0] / layer.weight.numel(), 0.0 if one_pass and not copies else held[1] / layer.weight.numel()


def kept_dtype(gate: Gate | None) -> torch.dtype:
    """The type of the evidence that the guard gets: coefficients come in bfloat16, gradients in float32."""
    return torch.bfloat16 if gate is not None and gate.uses == "coefficients" else torch.float32


@dataclass(frozen=True)
class _Ones:
    count: int
    dtype: torch.dtype

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        return Reference(vectors=[[torch.ones_like(p, dtype=self.dtype) for p in params] for _ in range(self.count)])


def available(device: torch.device) -> int:
    """Free bytes on the device of the model; in a container no more than its limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def giga(count: int) -> str:
    """Bytes in GB, to a useful digit.

    >>> giga(2_690_000_000), giga(12_000_000)
    ('2.7', '0.012')
    """
    value = count / 1e9
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def disk_free(path: Path) -> int:
    """Free bytes on the disk that a path, which need not exist yet, will be on."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    path = path.absolute()
    return path if path.exists() else _existing(path.parent)


# Which devices a job fits on, and with which settings: bytes by part, from the model's configuration alone.


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
        weights=4 * (size.parameters - size.packed) + round(loading.BYTES_PER_WEIGHT * size.packed),
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
        yield "--set gradient_checkpointing=true", light
    if config.settings().row.beta is not None and config.ema is None:
        small = light.model_copy(update={"ema": "uint8"})
        yield "--set gradient_checkpointing=true --set ema=uint8", small
        if config.optimizer == "adamw" and find_spec("bitsandbytes") is not None:
            text = "--set gradient_checkpointing=true --set ema=uint8 --set optimizer=adamw8bit"
            yield text, small.model_copy(update={"optimizer": "adamw8bit"})
    if config.lora is None and find_spec("peft") is not None:
        few = light.model_copy(update={"lora": Lora(r=16)})
        yield "--set gradient_checkpointing=true --lora r=16", few
        if config.load != loading.NAME:
            yield (
                "--set gradient_checkpointing=true --lora r=16 --set load=4bit",
                few.model_copy(update={"load": loading.NAME}),
            )


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
            if devices > 1 and changed.load == loading.NAME:
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
