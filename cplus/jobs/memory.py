"""A model's size and one estimate of a job's bytes, in memory and on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
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
from cplus.core.evidence import Evidence, Reference
from cplus.core.guard import Guard
from cplus.core.optim import AdamW
from cplus.distributed import processes as world
from cplus.jobs.settings import AdaptConfig
from cplus.methods.repair import BYTES_PER_PARAMETER
from cplus.methods.table import Method
from cplus.methods.variants import Remembered
from cplus.models import loading
from cplus.training.driver import STATE_BYTES, adapted, build_optimizer
from cplus.training.settings import Lora

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
class Bytes:
    """Bytes of a job in one process at its peak, by what they are for."""

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
        """All of it."""
        return sum(asdict(self).values())

    def over(self, devices: int) -> int:
        """Bytes on each of several devices: the state is sharded, and an evaluation sees the whole weights."""
        if devices == 1:
            return self.total
        return (self.total - self.activations) // devices + max(self.activations, self.weights)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes a job holds and writes here; `held` is certain, `peak` adds an estimate of the activations."""

    held: int
    peak: int
    available: int
    gate: int
    checkpoint: int
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
        with suppress(NotImplementedError):  # adapters computed from the weights count as training all of them
            model = adapted(config.model_copy(update={"gradient_checkpointing": False}), method, model)
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


def job_bytes(config: AdaptConfig, method: Method, size: ModelSize, num_anchors: int, *, copies: bool = False) -> Bytes:
    """The one estimate of a job's memory, from the model's configuration and a gate on a small layer."""
    frozen = size.parameters - size.trainable
    return Bytes(
        weights=4 * (size.parameters - size.packed) + round(loading.BYTES_PER_WEIGHT * size.packed),
        gradients=4 * size.trainable,
        optimizer=STATE_BYTES[config.optimizer] * size.trainable,
        gate=round(sum(guard_bytes(config, method, num_anchors, size.trainable, copies=copies)) * size.trainable),
        # What acts after training needs the frozen weights too, because adapters are merged into them.
        objective=round(method.bytes_per_parameter * size.trainable) + 4 * frozen * (method.after is not None),
        activations=size.activation_bytes // (CHECKPOINTED if config.gradient_checkpointing else 1),
    )


def footprint(config: AdaptConfig, method: Method, size: ModelSize, num_anchors: int) -> Footprint:
    """The job's bytes in memory and on disk, on this machine."""
    parts, device = job_bytes(config, method, size, num_anchors), models.choose_device(config.device)
    held = parts.total - parts.activations
    if config.repair:
        held = max(held, BYTES_PER_PARAMETER * size.parameters)
    processes = world.started()[1]
    if processes > 1:  # one GPU's, or what all processes of this machine share; evaluations see the whole weights
        held = held if config.sharding == "ddp" else held // processes + parts.weights
        held *= 1 if device.type == "cuda" else world.neighbours()
    # Merged, packed weights are float32 again.
    expanded = 4 * size.packed if config.lora is not None and config.lora.merge else 0
    checkpoint = 4 * size.trainable + parts.optimizer + parts.gate
    return Footprint(
        held=held,
        peak=held + max(parts.activations, expanded),
        available=available(device),
        gate=parts.gate,
        checkpoint=checkpoint,
        # A checkpoint is written beside the one it replaces.
        disk=2 * checkpoint + 4 * size.parameters + (64 << 20),
        free=disk_free(config.out),
    )


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
    optimizer = build_optimizer(config.model_copy(update={"lr": 1e-3}), layer)  # the rate takes no memory
    gate = method.build_gate(0)
    evidence: Evidence | None = None
    if method.evidence:
        small = gate is not None and gate.uses == "coefficients"  # which come in bfloat16, gradients in float32
        count = num_anchors if method.vectors == "one per anchor" else 1
        kind = torch.bfloat16 if small else torch.float32

        def evidence(params: Sequence[nn.Parameter], refresh: int) -> Reference:
            return Reference(vectors=[[torch.ones_like(p, dtype=kind) for p in params] for _ in range(count)])

        evidence = Remembered(evidence, method.memory) if method.memory else evidence
    with Guard(optimizer, layer, evidence=evidence, gate=gate, projection=method.projection) as guard:
        if evidence is not None:
            guard.refresh()
        layer(torch.ones(1, 64, device=layer.weight.device)).sum().backward()
        optimizer.step()
        held = guard.nbytes, guard.step_nbytes
        one_pass = isinstance(optimizer, AdamW) and guard.gating.compiles(trainable)
    return held[0] / layer.weight.numel(), 0.0 if one_pass and not copies else held[1] / layer.weight.numel()


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
    return shutil.disk_usage(
        next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    ).free


# What a job needs with less and less memory, where it cannot run here; from the model's configuration alone.


def lighter(config: AdaptConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes with which a job needs less and less memory, in words too; adapters are tried where they can train."""
    yield "as chosen", {}
    light, said = {"gradient_checkpointing": True}, "--set gradient_checkpointing=true"
    if not config.gradient_checkpointing:
        yield said, light
    if config.optimizer == "adamw" and find_spec("bitsandbytes") is not None:
        yield f"{said} --set optimizer=adamw8bit", {**light, "optimizer": "adamw8bit"}
    if config.lora is None and find_spec("peft") is not None:
        few = {**light, "lora": Lora(r=16)}
        yield f"{said} --lora r=16", few
        if config.load != loading.NAME:
            yield f"{said} --lora r=16 --set load={loading.NAME}", {**few, "load": loading.NAME}


def size_plan(config: AdaptConfig, method: Method, where: Path | str, reason: str) -> tuple[dict[str, Any], list[str]]:
    """What a job needs that cannot run here, as chosen and with less, in one process; `reason` says why it cannot."""
    size, needs = model_size(config, method, where), {}
    for text, changes in lighter(config):
        changed = config.model_copy(update=changes)
        new = model_size(changed, method, where) if "lora" in changes else size
        needs[text] = job_bytes(changed, method, new, config.num_anchors, copies=True)
    each = ", ".join(f"{name} {value / size.parameters:.2f}" for name, value in asdict(needs["as chosen"]).items())
    lines = [
        f"model      {config.model}: {size.parameters:,} parameters, {size.trainable:,} trained",
        f"bytes      per parameter: {each}",
    ]
    for text, found in needs.items():  # weights in 4 bits cannot be sharded
        several = "" if "4bit" in text else f", {giga(found.over(2))} on each of 2, {giga(found.over(8))} on each of 8"
        lines.append(f"needs      {text}: {giga(found.total)} GB on one device{several}")
    row = {
        "settings": config.model_dump(mode="json"),
        "size": asdict(size),
        "reason": reason,
        "bytes": {text: {**asdict(found), "total": found.total} for text, found in needs.items()},
    }
    return row, [*lines, f"here       {reason}"]
