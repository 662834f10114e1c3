"""Low-rank adapters by PEFT: the gate acts on the adapters' weights, which are all that trains."""

from __future__ import annotations

from typing import Any

import torch

from cplus.config import Lora


def with_adapters(model: Any, lora: Lora, *, seed: int) -> Any:
    """The model with adapters on every linear layer, drawn by the seed, everything else frozen."""
    try:
        import peft
    except ImportError as error:
        raise ImportError("training adapters needs the package peft: pip install 'cplus[peft]'") from error
    asked = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(model, asked)


def merged(model: Any, lora: Lora | None) -> Any:
    """The model as it will be written: adapters folded into the weights, unless they are to stay apart."""
    return model.merge_and_unload() if lora is not None and lora.merge else model
