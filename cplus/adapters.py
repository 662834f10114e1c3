"""Adapters by PEFT: the few weights that train in place of a model's own. PEFT is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from torch import nn

Adapter: TypeAlias = "Callable[[nn.Module, int], nn.Module]"
"""A model and a seed in, the model with adapters out: they train, everything else is frozen."""


class Lora(BaseModel):
    """The settings of low-rank adapters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    r: Annotated[int, Field(ge=1, description="Rank.")] = 16
    alpha: Annotated[float, Field(gt=0, description="Scale: the product is multiplied by alpha / r.")] = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1, description="Dropout on the adapters' input.")] = 0.0
    merge: Annotated[bool, Field(description="Write one plain model; false writes the adapters alone.")] = True


def lora(model: nn.Module, seed: int, settings: Lora | None = None) -> nn.Module:
    """Low-rank adapters on every linear layer, drawn by the seed; everything else is frozen.

    Source: Hu et al. 2022.    W x + (alpha / r) B A x, with A drawn and B zero
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
    """The smaller half of every linear layer's singular directions trains, its gradient kept orthogonal to the rest.

    Source: Nayak et al. 2025, OSF. Nothing is drawn, so the seed changes nothing.
    """
    peft = _peft()
    return _adapted(peft.get_peft_model(model, peft.OSFConfig(task_type="CAUSAL_LM", target_modules="all-linear")))


def merged(model: nn.Module) -> nn.Module:
    """The plain model, adapters folded into its weights; one without adapters as it is."""
    unload = getattr(model, "merge_and_unload", None)
    return model if unload is None else _adapted(unload())


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
