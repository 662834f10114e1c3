"""A prompt and all its candidates packed into one row: the prompt and the common prefix are processed once."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A prompt followed by its candidates; the last token of each candidate is only predicted, not an input."""

    prompt: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.prompt or not self.candidates or not all(self.candidates):
            raise ValueError(f"expected a prompt and candidates of at least one token each, got {self}")

    @property
    def kept(self) -> int:
        """The number of positions that need logits: the prompt's last, and all of a candidate's but its last."""
        return 1 + sum(len(candidate) - 1 for candidate in self.candidates)

    def __len__(self) -> int:
        return len(self.prompt) + self.kept - 1


@dataclass(frozen=True, slots=True)
class _Layout:
    """The position of each token: `segments` is 0 for a prompt, 1, 2, ... for its candidates, -1 for padding."""

    ids: Tensor
    positions: Tensor
    segments: Tensor
    where: list[tuple[int, int, int]]


def packed_scores(model: Any, rows: Sequence[PackedRow], offset: int, prefix: Any | None) -> list[list[float]]:
    """Each candidate's summed log-likelihood; `prefix` is the key-value cache of `offset` tokens before all rows."""
    device = next(model.parameters()).device
    layout = _lay_out(rows, offset)
    past = copy.deepcopy(prefix)
    if past is not None:
        past.batch_repeat_interleave(len(rows))
    logits = model(
        input_ids=layout.ids.to(device),
        attention_mask=_block_mask(model, layout.segments.to(device), offset),
        position_ids=layout.positions.to(device),
        past_key_values=past,
        use_cache=past is not None,
        logits_to_keep=max(row.kept for row in rows),
    ).logits.float()
    row, column, token = torch.tensor(layout.where, device=device).unbind(1)
    chosen = iter((logits[row, column, token] - logits.logsumexp(2)[row, column]).tolist())
    return [[sum(next(chosen) for _ in candidate) for candidate in row.candidates] for row in rows]


def read_prefix(model: Any, prefix: Tokens) -> Any | None:
    """The key-value cache of the common prefix."""
    if not prefix:
        return None
    ids = torch.tensor([prefix], device=next(model.parameters()).device)
    return model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values


def takes_block_masks(model: Any, longest: int) -> bool:
    """Whether the model's attention accepts a custom mask for rows of up to `longest` tokens."""
    config = model.config
    arguments = inspect.signature(type(model).forward).parameters
    sliding = getattr(config, "sliding_window", None)
    return (
        {"position_ids", "past_key_values", "logits_to_keep"} <= set(arguments)
        and config._attn_implementation in ("sdpa", "eager")
        and not getattr(model, "_is_stateful", False)
        and not getattr(config, "alibi", False)
        # A block mask has no sliding window, so no row may be longer than it.
        and (sliding is None or longest <= sliding)
    )


def _lay_out(rows: Sequence[PackedRow], offset: int) -> _Layout:
    """Left-padded rows; `where` lists (row, column among the kept, token) for every token to be predicted."""
    width, keep = max(map(len, rows)), max(row.kept for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    layout = _Layout(ids, torch.zeros_like(ids), torch.full_like(ids, -1), [])
    for i, row in enumerate(rows):
        column = width - len(row)
        last = column + len(row.prompt) - 1
        _put(layout, i, column, row.prompt, position=offset, segment=0)
        column = last + 1
        for j, candidate in enumerate(row.candidates, start=1):
            _put(layout, i, column, candidate[:-1], position=offset + len(row.prompt), segment=j)
            columns = (last, *range(column, column + len(candidate) - 1))
            layout.where.extend((i, at - (width - keep), token) for at, token in zip(columns, candidate, strict=True))
            column += len(candidate) - 1
    return layout


def _put(layout: _Layout, row: int, column: int, tokens: Tokens, *, position: int, segment: int) -> None:
    cells = slice(column, column + len(tokens))
    layout.ids[row, cells] = torch.tensor(tokens, dtype=torch.long)
    layout.positions[row, cells] = torch.arange(position, position + len(tokens))
    layout.segments[row, cells] = segment


def _block_mask(model: Any, segments: Tensor, offset: int) -> Tensor:
    """The causal attention mask: every token sees the prefix and the prompt, a candidate otherwise only itself."""
    rows, width = segments.shape
    own = segments[:, :, None] == segments[:, None, :]
    seen = (own | (segments[:, None, :] == 0)).tril()
    seen = torch.cat([seen.new_ones(rows, width, offset), seen], dim=2)[:, None]
    if model.config._attn_implementation == "sdpa":
        return seen
    # Eager attention adds the mask to its scores.
    return torch.zeros_like(seen, dtype=model.dtype).masked_fill_(~seen, torch.finfo(model.dtype).min)
