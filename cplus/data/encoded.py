"""Tokens of one example: what the model reads and what it is asked to say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt and its target; the loss is taken at the target's tokens only."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.prompt or not self.target:
            raise ValueError(
                f"expected at least one prompt token and one target token, "
                f"got {len(self.prompt)} and {len(self.target)}"
            )

    def __len__(self) -> int:
        return len(self.prompt) + len(self.target)


def length_sorted_batches(lengths: Sequence[int], *, max_tokens: int, max_rows: int) -> Iterator[list[int]]:
    """Indices in batches of like length, longest first, each at most `max_tokens` when padded.

    >>> list(length_sorted_batches([3, 9, 4, 8], max_tokens=18, max_rows=8))
    [[1, 3], [2, 0]]
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and (len(batch) == max_rows or lengths[batch[0]] * (len(batch) + 1) > max_tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
