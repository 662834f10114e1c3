"""Low-rank adapters by the job's settings: the gate acts on the adapters' weights, which are all that trains."""

from __future__ import annotations

from typing import Any

from cplus import adapters
from cplus.experiment.settings import Lora


def with_adapters(model: Any, lora: Lora, *, seed: int) -> Any:
    """The model with adapters on every linear layer, drawn by the seed, everything else frozen."""
    return adapters.lora(model, seed, r=lora.r, alpha=lora.alpha, dropout=lora.dropout)


def merged(model: Any, lora: Lora | None) -> Any:
    """The model as it will be written: adapters folded into the weights, unless they are to stay apart."""
    return adapters.merged(model) if lora is not None and lora.merge else model
