"""Batches of rows of similar length, as large as the device and the memory for logits allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from cplus.data.batching import length_sorted_batches
from cplus.models import window
from cplus.terminal import progress

_MAX_ROWS = 256
_MAX_LOGITS = 2**28
# Scoring is compute-bound: on a CPU, batches larger than the caches are slower.
_SCORED_TOKENS = {"cpu": 512, "mps": 4096, "cuda": 16384}
# Decoding reads all weights for each token of a batch, so a batch is as large as the key-value cache allows.
_DECODED_TOKENS = {"cpu": 8192, "mps": 8192, "cuda": 65536}


def scored(model: nn.Module, lengths: Sequence[int], kept: Sequence[int], what: str) -> Iterator[list[int]]:
    """Indices of rows to score together; `kept` is the number of positions at which each row needs logits."""
    if not lengths:
        return iter(())
    share = max(positions / length for positions, length in zip(kept, lengths, strict=True))
    within_memory = int(_MAX_LOGITS / (vocabulary(model) * share))
    return _batches(lengths, min(_SCORED_TOKENS[_device(model)], within_memory), what)


def decoded(model: nn.Module, lengths: Sequence[int], what: str) -> Iterator[list[int]]:
    """Indices of rows to decode together; the lengths include the tokens to be generated."""
    return _batches(lengths, _DECODED_TOKENS[_device(model)], what)


def _batches(lengths: Sequence[int], max_tokens: int, what: str) -> Iterator[list[int]]:
    """Batches of similar length, with a progress bar."""
    with progress() as bars:
        task = bars.add_task(what, total=len(lengths))
        for batch in length_sorted_batches(lengths, max_tokens=max_tokens, max_rows=_MAX_ROWS):
            yield batch
            bars.advance(task, len(batch))


def _device(model: nn.Module) -> str:
    kind = next(model.parameters()).device.type
    return kind if kind in _SCORED_TOKENS else "cpu"


def bare(model: nn.Module) -> Any:
    """The transformers model inside a PEFT wrapper: it includes the adapters, and its forward has named arguments."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def vocabulary(model: nn.Module) -> int:
    """The number of logits per position."""
    return int(bare(model).config.get_text_config().vocab_size)


def check_window(model: nn.Module, lengths: Sequence[int]) -> None:
    """Refuse rows with more tokens than the model's window."""
    limit = window(bare(model))
    over = [length for length in lengths if length > limit]
    if over:
        raise ValueError(
            f"{len(over)} of {len(lengths)} rows are longer than the model's window of {limit} tokens "
            f"(the longest has {max(over)}); shorten or exclude them"
        )
