"""Batches of rows of similar length, bounded in memory; the bounds never change a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cplus.cost import PASS_TOKENS, Work
from cplus.data.encoded import Encoded

MAX_TOKENS = PASS_TOKENS
"""Padded tokens in one pass."""
MAX_ROWS = 256
MAX_PADDING = 128
"""Padding tokens in one pass; beyond that another pass is cheaper."""


def length_sorted_batches(
    lengths: Sequence[int], *, max_tokens: int, max_rows: int, max_padding: int | None = None
) -> Iterator[list[int]]:
    """Indices in batches of like length, longest first, each at most `max_tokens` when padded.

    `max_padding` bounds the padding of one batch: a second batch then costs less than the padding it saves.

    >>> list(length_sorted_batches([3, 9, 4, 8], max_tokens=18, max_rows=8))
    [[1, 3], [2, 0]]
    >>> list(length_sorted_batches([3, 9, 4, 8], max_tokens=64, max_rows=8, max_padding=5))
    [[1, 3], [2, 0]]
    """
    batch: list[int] = []
    padding = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch:
            longest = lengths[batch[0]]
            padding += longest - lengths[index]
            wasteful = max_padding is not None and padding > max_padding
            if wasteful or len(batch) == max_rows or longest * (len(batch) + 1) > max_tokens:
                yield batch
                batch, padding = [], 0
        batch.append(index)
    if batch:
        yield batch


def like_length(rows: Sequence[Encoded], max_tokens: int, parts: int = 1) -> Iterator[list[int]]:
    """The indices of rows, in batches for one training pass each; at least so many parts where the rows suffice."""
    lengths, most = [len(row) for row in rows], min(MAX_ROWS, -(-len(rows) // parts))
    return length_sorted_batches(lengths, max_tokens=max_tokens, max_rows=most, max_padding=MAX_PADDING)


def batched(rows: Sequence[Encoded], max_tokens: int = MAX_TOKENS) -> Iterator[list[Encoded]]:
    """Rows in batches for one training pass each."""
    for batch in like_length(rows, max_tokens):
        yield [rows[i] for i in batch]


def measured(batch: Sequence[Encoded]) -> Work:
    """The work of one forward and backward pass over a padded batch."""
    return Work(rows=len(batch), tokens=sum(map(len, batch)), padded=len(batch) * max(map(len, batch)))
