"""A model's size and a job's bytes in memory and on disk, computed before anything large is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from gguf import GGUFReader
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cplus import models, world
from cplus.attach import Guard
from cplus.cost import activation_bytes
from cplus.environment import free_memory
from cplus.evidence import Evidence, Reference, Remembered
from cplus.experiment.driver import STATE_BYTES, adapted, build_optimizer
from cplus.gates import Gate
from cplus.job.settings import AdaptConfig
from cplus.methods import Method
from cplus.models import four_bit
from cplus.optim import AdamW
from cplus.repairing.model import BYTES_PER_PARAMETER

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
        packed = four_bit.packable(model) if config.load == four_bit.NAME else 0
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
    weights = 4 * (size.parameters - size.packed) + round(four_bit.BYTES_PER_WEIGHT * size.packed)
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
