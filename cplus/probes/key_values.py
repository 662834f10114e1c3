"""A key-value cache for many rows: prompts are computed once, and rows can join and leave at any step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_GROUPED = "cplus_grouped"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt: each layer's keys and values, and the logits after its last token."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    logits: Tensor

    @property
    def num_tokens(self) -> int:
        """The number of tokens it covers."""
        return int(self.layers[0][0].shape[-2])

    @property
    def num_bytes(self) -> int:
        """The memory it uses."""
        return sum(t.nbytes for pair in self.layers for t in pair) + self.logits.nbytes


def chunk_ends(pieces: Sequence[str], *, shortest: int = 16, longest: int = 128) -> list[int]:
    """Where a prompt is split: after blank lines, which separate demonstrations, and at the latest after `longest`.

    The split depends only on the prompt, so prompts with a common prefix share its chunks in any order of computation.

    >>> chunk_ends(["a", "\\n\\n", "b", "c", "\\n", "\\n", "d", "e"], shortest=2)
    [2, 6, 8]
    """
    ends, begun, before = [], 0, ""
    for end, piece in enumerate(pieces, 1):
        blank = "\n\n" in piece or (piece.endswith("\n") and before.endswith("\n"))
        # A short remainder is not worth a separate pass.
        fits = end - begun >= shortest and len(pieces) - end >= shortest
        if end - begun >= longest or (blank and fits):
            ends.append(end)
            begun = end
        before = piece
    return ends if begun == len(pieces) else [*ends, len(pieces)]


class Prefixes:
    """Prompts computed once and continued many times, within a memory budget."""

    def __init__(self, model: Any, ends: Callable[[tuple[int, ...]], list[int]], *, max_bytes: int) -> None:
        self._model, self._ends, self._max_bytes = model, ends, max_bytes
        self._chunks: OrderedDict[tuple[int, tuple[int, ...]], Chunk] = OrderedDict()
        self._bytes = 0

    def chunks(self, prompt: tuple[int, ...]) -> list[Chunk]:
        """The prompt's chunks in order, cached ones from memory."""
        found: list[Chunk] = []
        begin = 0
        for end in self._ends(prompt):
            # The key includes the chunk's start: split differently, the same tokens differ in the last bit.
            key = (begin, prompt[:end])
            chunk = self._chunks.pop(key, None)
            if chunk is None:
                chunk = self._compute(prompt[begin:end], found)
                self._bytes += chunk.num_bytes
            self._chunks[key] = chunk
            found.append(chunk)
            begin = end
        while self._bytes > self._max_bytes:
            self._bytes -= self._chunks.popitem(last=False)[1].num_bytes
        return found

    def _compute(self, tokens: tuple[int, ...], before: Sequence[Chunk]) -> Chunk:
        cache, begin = DynamicCache(), sum(chunk.num_tokens for chunk in before)
        for layer, parts in enumerate(zip(*(chunk.layers for chunk in before), strict=True)):
            keys, values = (torch.cat(tensors, dim=-2) for tensors in zip(*parts, strict=True))
            cache.update(keys, values, layer)
        device = self._model.device
        logits = self._model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.arange(begin, begin + len(tokens), device=device).unsqueeze(0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[0, -1]
        layers = tuple((layer.keys[:, :, begin:].clone(), layer.values[:, :, begin:].clone()) for layer in cache.layers)
        return Chunk(layers, logits.float().clone())


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of `Slots`, as the model sees it."""

    is_sliding = False

    def __init__(self, slots: Slots, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self._slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the memory is allocated at construction."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, end = self._slots.rows, self._slots.end
        self.keys[:rows, :, end : end + 1] = key_states
        self.values[:rows, :, end : end + 1] = value_states
        seen = slice(self._slots.first, end + 1)
        return self.keys[:rows, :, seen], self.values[:rows, :, seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._slots.end - self._slots.first

    def get_max_length(self) -> int:
        return int(self.keys.shape[-2])


class Slots:
    """Rows of different lengths that end at the same column and grow together; rows can join or leave at any step."""

    def __init__(self, like: Chunk, *, rows: int, longest: int, columns: int) -> None:
        self.rows, self.end = 0, longest
        self.starts: list[int] = []
        buffers = [[t.new_zeros(rows, t.shape[1], columns, t.shape[-1]) for t in pair] for pair in like.layers]
        # Zeros, not garbage: a masked column has weight 0, and 0 times NaN is NaN.
        self.cache = Cache(layers=[_Layer(self, keys, values) for keys, values in buffers])
        self._columns = columns

    @property
    def first(self) -> int:
        """The first column that any row uses."""
        return min(self.starts, default=self.end)

    def put(self, row: int, chunks: Sequence[Chunk]) -> None:
        """Write a prompt into a row, with its last token at the last used column."""
        start = self.end - sum(chunk.num_tokens for chunk in chunks)
        assert 0 <= row <= self.rows
        assert start >= 0
        self.rows = max(self.rows, row + 1)
        self.starts[row : row + 1] = [start]
        for chunk in chunks:
            columns = slice(start, start + chunk.num_tokens)
            for layer, (keys, values) in zip(self.cache.layers, chunk.layers, strict=True):
                layer.keys[row, :, columns], layer.values[row, :, columns] = keys[0], values[0]
            start = columns.stop

    def drop(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        self.rows -= 1
        last = self.starts.pop()
        if row == self.rows:
            return
        self.starts[row] = last
        for layer in self.cache.layers:
            for buffer in (layer.keys, layer.values):
                buffer[row, :, last : self.end] = buffer[self.rows, :, last : self.end]

    def step(self, model: Any, tokens: Sequence[int]) -> Tensor:
        """Append one token to each row and return the logits after it."""
        if self.end == self._columns:
            self._shift()
        device, first = model.device, self.first
        starts = torch.tensor(self.starts, device=device).unsqueeze(1)
        seen = torch.arange(first, self.end + 1, device=device).unsqueeze(0) >= starts
        logits: Tensor = model(
            input_ids=torch.tensor(tokens, device=device).unsqueeze(1),
            attention_mask=seen.long(),
            position_ids=self.end - starts,
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        self.end += 1
        return logits.float()

    def _shift(self) -> None:
        by = self.first
        for layer in self.cache.layers:
            for buffer in (layer.keys, layer.values):
                buffer[: self.rows, :, : self.end - by] = buffer[: self.rows, :, by : self.end].clone()
        self.starts = [start - by for start in self.starts]
        self.end -= by


@contextmanager
def grouped_attention(model: Any) -> Iterator[None]:
    """Make the decoding steps of a model with grouped-query attention read shared key heads without copying them."""
    before = model.config._attn_implementation
    if before != "sdpa":  # the model needs another implementation, for instance for soft-capped scores
        yield
        return
    AttentionInterface.register(_GROUPED, _attend)
    AttentionMaskInterface.register(_GROUPED, sdpa_mask)
    model.set_attn_implementation(_GROUPED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    rows, heads, length, width = query.shape
    groups = heads // key.shape[1]
    if length > 1 or groups == 1:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    # One query per head: heads that share keys become the queries of one head.
    shared = query.reshape(rows, key.shape[1], groups, width)
    out = torch.nn.functional.scaled_dot_product_attention(
        shared, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return out.reshape(rows, 1, heads, value.shape[-1]), None
