"""PEFT adapters: a small set of weights trained instead of the model's own. PEFT is imported only when needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from cplus.methods.objectives import Strength

if TYPE_CHECKING:
    from torch import nn


Adapter: TypeAlias = "Callable[[nn.Module, int], nn.Module]"
"""From a model and a seed to the model with adapters; only the adapters train, everything else is frozen."""


class Lora(BaseModel):
    """The settings of low-rank adapters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    r: Annotated[int, Field(ge=1, description="Rank.")] = 16
    alpha: Annotated[float, Field(gt=0, description="Scale: the product is multiplied by alpha / r.")] = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1, description="Dropout on the adapters' input.")] = 0.0
    merge: Annotated[bool, Field(description="Write one plain model; false writes the adapters alone.")] = True


def lora(model: nn.Module, seed: int, settings: Lora | None = None) -> nn.Module:
    """Low-rank adapters on every linear layer, initialised from the seed; everything else is frozen.

    Source: Hu et al. 2022.    W x + (alpha / r) B A x, with A random and B zero
    """
    import torch

    peft, chosen = _peft(), settings or Lora()
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=chosen.r,
        lora_alpha=chosen.alpha,
        lora_dropout=chosen.dropout,
        target_modules="all-linear",
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


@dataclass(frozen=True)
class LastBlocks(Strength):
    """Train the last blocks of the model alone: `strength` is the share of blocks that is frozen, the first ones.

    Embeddings, final norm and head are frozen too. Nothing is random, so the seed has no effect.
    """

    strength: float = 0.5
    within = "[0, 1)"
    trains: str = "last blocks"

    def __call__(self, model: nn.Module, seed: int) -> nn.Module:
        """Freeze everything, then let the last blocks train."""
        blocks = _blocks(model)
        model.requires_grad_(False)
        for block in blocks[int(self.strength * len(blocks)) :]:
            block.requires_grad_(True)
        return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer's blocks, in order."""
    from torch import nn

    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ValueError(
        f"expected a model with a list of num_hidden_layers blocks, got {type(model).__name__} without one; choose "
        "another method than freeze-layers"
    )


def merged(model: nn.Module) -> nn.Module:
    """The plain model with its adapters merged into the weights; a model without adapters is returned unchanged."""
    unload = getattr(model, "merge_and_unload", None)
    if unload is None:
        return model
    return _expanded(model) if any(hasattr(p, "quant_state") for p in model.parameters()) else _adapted(unload())


def _expanded(model: Any) -> nn.Module:
    """Adapters merged into the float32 values of packed weights: merged as 4 bits, they would be rounded away."""
    import torch

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
    from torch import nn

    assert isinstance(model, nn.Module)
    return model


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError("training adapters needs the package peft: pip install 'cplus[peft]'") from error
    return peft
