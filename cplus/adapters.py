"""PEFT adapters: a small set of weights trained instead of the model's own. PEFT is imported only when needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

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
