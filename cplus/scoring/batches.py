"""Batches of like length, as large as the device and the logits' memory allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from cplus.data.encoded import length_sorted_batches
from cplus.models import window
from cplus.terminal import progress

_MAX_ROWS = 256
_MAX_LOGITS = 2**28
_MAX_TOKENS = {"cpu": 1024, "mps": 4096, "cuda": 16384}


def batches(model: nn.Module, lengths: Sequence[int], kept: Sequence[int], what: str) -> Iterator[list[int]]:
    """Indices of rows of like length, with a progress bar; `kept` says at how many positions a row needs logits."""
    if not lengths:
        return
    device = next(model.parameters()).device.type
    share = max(positions / length for positions, length in zip(kept, lengths, strict=True))
    within_memory = int(_MAX_LOGITS / (vocabulary(model) * share))
    tokens = min(_MAX_TOKENS.get(device, _MAX_TOKENS["cpu"]), within_memory)
    with progress() as bars:
        task = bars.add_task(what, total=len(lengths))
        for batch in length_sorted_batches(lengths, max_tokens=tokens, max_rows=_MAX_ROWS):
            yield batch
            bars.advance(task, len(batch))


def bare(model: nn.Module) -> Any:
    """The transformers model inside a PEFT wrapper: its layers carry the adapters, its forward names its arguments."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def vocabulary(model: nn.Module) -> int:
    """How many logits a position has."""
    return int(bare(model).config.get_text_config().vocab_size)


def check_window(model: nn.Module, lengths: Sequence[int]) -> None:
    """Refuse rows of more tokens than the model reads at once."""
    limit = window(bare(model))
    over = [length for length in lengths if length > limit]
    if over:
        raise ValueError(
            f"{len(over)} of {len(lengths)} rows are longer than the model's window of {limit} tokens "
            f"(the longest has {max(over)}); shorten them or exclude them"
        )
