"""Tokens of one example: what the model reads and what it learns to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from cplus.base.cost import PASS_TOKENS, Work

_SHORTEST_PREFIX = 8
ZERO_EVIDENCE = (
    "The evidence is zero everywhere, so the gate has no effect: the anchors and probes are already fitted exactly, or "
    "their loss does not depend on the trained weights. Check the anchors and probes."
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt and its target; the loss is computed at the target's tokens only.

    `scored` selects tokens of the target, for conversations of several turns; if it is empty, all are scored.

    >>> Encoded((1, 2), (3, 4, 5), (True, False, True)).labels
    (3, -100, 5)
    """

    prompt: tuple[int, ...]
    target: tuple[int, ...]
    scored: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt or not self.target:
            raise ValueError(
                f"expected at least one prompt token and one target token, "
                f"got {len(self.prompt)} and {len(self.target)}"
            )
        if self.scored and (len(self.scored) != len(self.target) or not any(self.scored)):
            raise ValueError(f"expected to score some of {len(self.target)} target tokens, got {self.scored}")

    @property
    def labels(self) -> tuple[int, ...]:
        """The target with -100 where a token is read and not scored."""
        if not self.scored:
            return self.target
        return tuple(token if scored else -100 for token, scored in zip(self.target, self.scored, strict=True))

    @property
    def num_scored(self) -> int:
        """The number of tokens in the loss."""
        return sum(self.scored) if self.scored else len(self.target)

    def features(self) -> dict[str, list[int]]:
        """The row as trainers and their collators take it: all tokens, and labels of -100 where nothing is learned.

        >>> Encoded((1, 2), (3,)).features()
        {'input_ids': [1, 2, 3], 'labels': [-100, -100, 3]}
        """
        return {"input_ids": [*self.prompt, *self.target], "labels": [-100] * len(self.prompt) + [*self.labels]}

    def beginning(self, tokens: int) -> Encoded:
        """The row up to its first scored tokens.

        >>> Encoded((1, 2), (3, 4, 5), (False, True, True)).beginning(1)
        Encoded(prompt=(1, 2), target=(3, 4), scored=(False, True))
        """
        ends = [end for end, label in enumerate(self.labels, 1) if label != -100][:tokens]
        return Encoded(self.prompt, self.target[: ends[-1]], self.scored[: ends[-1]])

    def __len__(self) -> int:
        return len(self.prompt) + len(self.target)


def shared_prefix(prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The beginning common to all prompts, short of any whole prompt; empty where sharing it would not pay.

    >>> shared_prefix([[*range(9), 1, 2], [*range(9), 3]])
    (0, 1, 2, 3, 4, 5, 6, 7, 8)
    """
    if len(prompts) < 2:
        return ()
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    common = tuple(tokens[0] for tokens in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
    return common if len(common) >= _SHORTEST_PREFIX else ()


def fit(rows: Sequence[Encoded], window: int, policy: Literal["refuse", "exclude"] = "refuse") -> list[int]:
    """The positions of the rows that the model's window holds; others are refused, or left out.

    >>> fit([Encoded((1, 2), (3,)), Encoded((1, 2, 3), (4,))], window=2, policy="exclude")
    [0]
    """
    # The last target token is predicted, never read, so it needs no place.
    lengths = [len(row) - 1 for row in rows]
    excluded = [i for i, length in enumerate(lengths) if length > window]
    if excluded and policy == "refuse":
        raise ValueError(
            f"{len(excluded)} of {len(rows)} rows are longer than the limit of {window} tokens "
            f"(the longest has {max(lengths)}; the first is row {excluded[0] + 1}); "
            "shorten them, or choose with too_long what is done with them"
        )
    return [i for i, length in enumerate(lengths) if length <= window]


# Batches of rows of similar length, bounded in memory; the bounds never change a gradient.


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
