"""PEFT adapters: a small set of weights trained instead of the model's own. PEFT is imported only when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn


def lora(model: nn.Module, seed: int, *, r: int = 16, alpha: float = 32.0, dropout: float = 0.0) -> nn.Module:
    """Low-rank adapters on every linear layer, initialised from the seed; everything else is frozen.

    Source: Hu et al. 2022.    W x + (alpha / r) B A x, with A random and B zero
    """
    peft = _peft()
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules="all-linear"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _adapted(peft.get_peft_model(model, config))


def osf(model: nn.Module, seed: int) -> nn.Module:
    """Train the smaller half of every linear layer's singular directions, with gradients orthogonal to the others.

    Source: Nayak et al. 2025, OSF. Nothing is random, so the seed has no effect.
    """
    peft = _peft()
    return _adapted(peft.get_peft_model(model, peft.OSFConfig(task_type="CAUSAL_LM", target_modules="all-linear")))


def last_blocks(model: nn.Module, seed: int, strength: float) -> nn.Module:
    """Train the last blocks of the model alone: `strength` is the share of blocks that is frozen, the first ones.

    Embeddings, final norm and head are frozen too. Nothing is random, so the seed has no effect.
    """
    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    lists = [own for own in model.modules() if isinstance(own, nn.ModuleList) and len(own) == count]
    if not lists:
        raise ValueError(
            f"expected a model with a list of num_hidden_layers blocks, got {type(model).__name__} without one; choose "
            "another method than freeze-layers"
        )
    model.requires_grad_(False)
    lists[0][int(strength * len(lists[0])) :].requires_grad_(True)
    return model


def merged(model: nn.Module) -> nn.Module:
    """The plain model with its adapters merged into the weights; a model without adapters is returned unchanged."""
    unload = getattr(model, "merge_and_unload", None)
    if unload is None:
        return model
    return _expanded(model) if any(hasattr(p, "quant_state") for p in model.parameters()) else _adapted(unload())


def _expanded(model: Any) -> nn.Module:
    """Adapters merged into the float32 values of packed weights: merged as 4 bits, they would be rounded away."""
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "get_delta_weight")}
    changes = {name: layer.get_delta_weight("default") for name, layer in layers.items()}
    plain = model.unload().dequantize()
    with torch.no_grad():
        for name, change in changes.items():
            plain.get_submodule(name.removeprefix("base_model.model.")).weight.add_(change)
    return _adapted(plain)


def merged_from(folder: Path, model: nn.Module) -> nn.Module:
    """The model with the adapters of a folder merged into its weights; adapters that do not fit are refused."""
    if not (folder / "adapter_model.safetensors").is_file():
        raise ValueError(f"{folder}: expected adapters in safetensors, but it holds no adapter_model.safetensors")
    peft = _peft()
    try:
        found = merged(peft.PeftModel.from_pretrained(model, folder))
    except (RuntimeError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"{folder}: its adapters do not fit the base model: {first}") from error
    if isinstance(found, peft.PeftModel):
        raise ValueError(f"{folder}: its adapters cannot be merged into weights; expected low-rank adapters (LoRA)")
    return found


def _adapted(model: Any) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError("training adapters needs the package peft: pip install 'cplus[peft]'") from error
    return peft
