"""The paper's settings for the paper's models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One model of the paper and the paper's settings for it.

    Paper: Sec. 4.1; App. E. Batch and weight decay: protocol sections 1 and 2.
    """

    model: str
    thinking: bool | None = None  # False turns thinking off in the chat template; None: the template has no such switch
    learning_rate: float = 1e-6
    epochs: int = 25
    batch_size: int = 1
    weight_decay: float = 0.1
    num_probes: int = 512
    shots: int = 2
    temperature: float = 0.8
    anchor_weight: float = 0.5
    beta: float = 0.9


PRESETS: dict[str, Preset] = {
    "qwen3-0.6b": Preset(model="Qwen/Qwen3-0.6B", thinking=False),
    "qwen3-1.7b": Preset(model="Qwen/Qwen3-1.7B", thinking=False),
    "qwen3-4b": Preset(model="Qwen/Qwen3-4B", thinking=False),
    "gemma-2-2b-it": Preset(model="google/gemma-2-2b-it"),
    "phi-3.5-mini": Preset(model="microsoft/Phi-3.5-mini-instruct", learning_rate=1e-5),
}


def preset(model: str) -> Preset | None:
    """The preset of a model by its alias or its hub id; None if the paper has no such model.

    >>> preset("microsoft/Phi-3.5-mini-instruct") is preset("phi-3.5-mini")
    True
    """
    return PRESETS.get(model) or next((found for found in PRESETS.values() if found.model == model), None)
