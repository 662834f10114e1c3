"""The interface of sampling engines: their requests and their samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

End: TypeAlias = Literal["stop", "end of text", "limit"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Tokens to continue; all randomness of the continuation comes from `seed`."""

    index: int
    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How continuations are sampled, the same for every request.

    Paper: T in App. C.1.
    """

    temperature: float
    max_new_tokens: int
    stop: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not all(self.stop):
            raise ValueError(f"expected non-empty stop texts, got {self.stop!r}")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The continuation of one request, up to and including the stop text; `tokens` is the number of sampled tokens.

    `end` is what ended it: a stop text, the model's own end of text, or the token limit.
    """

    index: int
    text: str
    tokens: int
    end: End


class Engine(Protocol):
    """Continues requests; the same list of requests always gives the same samples, whatever order they finish in."""

    def describe(self) -> dict[str, Any]:
        """The description of the engine in a bank's manifest."""
        ...

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        """Yield each request's sample when it is finished."""
        ...


def request_seed(seed: int, index: int) -> int:
    """The seed of one request, which depends only on the bank's seed and the request's index.

    >>> request_seed(0, 1) == request_seed(0, 1) != request_seed(1, 0)
    True
    """
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def pick(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """One token per row, drawn at `temperature` by inverting the distribution at a number in [0, 1).

    Each token uses one number, so a row's tokens do not depend on the other rows of the batch.

    >>> pick(torch.tensor([[0.0, 9.0], [0.0, 0.0]]), torch.tensor([0.5, 0.4]), 0.8).tolist()
    [1, 0]
    """
    cumulative = (logits.float() / temperature).softmax(-1).cumsum(-1, dtype=torch.float64)
    threshold = uniforms.to(cumulative).unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return drawn.clamp_(max=logits.shape[-1] - 1)


def cut(text: str, stop: Sequence[str]) -> str | None:
    """The text up to and including the first stop text, or None if there is none.

    >>> cut("Why?\\nAnswer: x", ["x", "\\nAnswer:"])
    'Why?\\nAnswer:'
    """
    ends = [(at, at + len(mark)) for mark in stop if (at := text.find(mark)) >= 0]
    return text[: min(ends)[1]] if ends else None


class Reader:
    """Decodes tokens; it decodes a whole row only after a token that can complete a stop text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._last = {mark[-1] for mark in stop}
        self._may_end: dict[int, bool] = {}

    def text(self, tokens: Sequence[int]) -> str:
        """The text of a row."""
        return self._decode(tokens)

    def stopped(self, tokens: Sequence[int]) -> str | None:
        """The row's text up to and including its stop text, or None while there is none."""
        token = tokens[-1]
        if token not in self._may_end:
            piece = self._decode([token])
            # Part of a character decodes to a replacement character, which may hide anything.
            self._may_end[token] = "\ufffd" in piece or any(mark in piece for mark in self._last)
        return cut(self._decode(tokens), self._stop) if self._may_end[token] else None
