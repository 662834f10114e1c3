"""A base model held in 4 bits (NF4, by bitsandbytes), for adapters that train on top of it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

NAME = "4bit"
BYTES_PER_WEIGHT = 0.52
"""4 bits and 0.13 more: each block of 64 weights has a scale, and the scales are packed too."""
_DEVICES = ("cuda", "cpu")


def check(device: torch.device) -> None:
    """Refuse what cannot work, before anything is loaded."""
    absent = [package for package in ("bitsandbytes", "accelerate", "peft") if find_spec(package) is None]
    if absent:
        raise ImportError(
            f"loading a model in 4 bits needs the package {absent[0]}: pip install 'cplus[bnb]'; or leave out load"
        )
    if device.type not in _DEVICES:
        raise ValueError(
            f"a model in 4 bits needs a device of {' or '.join(_DEVICES)}, got {device.type}; choose another device, "
            "or leave out load"
        )


def loading(device: torch.device) -> dict[str, Any]:
    """What transformers needs to load the linear layers in 4 bits, all others in float32."""
    from transformers import BitsAndBytesConfig

    check(device)
    packed = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return {"quantization_config": packed, "device_map": {"": device}, "dtype": torch.float32}


def packable(model: nn.Module) -> int:
    """The number of weights that 4 bits would hold: those of linear layers, the output layer left out."""
    named: Any = model
    output = named.get_output_embeddings()
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not output)
    return sum(layer.weight.numel() for layer in layers)


def num_weights(model: nn.Module) -> int:
    """The number of a model's weights; a packed tensor counts for what it holds."""
    return sum(
        p.numel() if (packed := getattr(p, "quant_state", None)) is None else packed.shape.numel()
        for p in model.parameters()
    )
