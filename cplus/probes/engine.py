"""The seam where probes are sampled: what is asked of an engine, and what comes back."""

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
    """How continuations are drawn, the same for every request.

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
            raise ValueError(f"expected stop texts that are not empty, got {self.stop!r}")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The continuation of one request, up to and with the stop text; `tokens` counts what was drawn for it.

    `end` says what ended it: a stop text, the model's own end of text, or the limit.
    """

    index: int
    text: str
    tokens: int
    end: End


class Engine(Protocol):
    """Continues requests; the same list of requests always gives the same samples, in whatever order they finish."""

    def describe(self) -> dict[str, Any]:
        """What a bank's manifest says about where its texts were sampled."""
        ...

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        """Yield each request's sample when it is finished."""
        ...


def request_seed(seed: int, index: int) -> int:
    """A request's own seed: a function of the bank's seed and the request's index alone.

    >>> request_seed(0, 1) == request_seed(0, 1) != request_seed(1, 0)
    True
    """
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def pick(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """One token a row, drawn at `temperature` by inverting the distribution at a number in [0, 1).

    One number a token, so a row's draw does not depend on what else is in the batch.

    >>> pick(torch.tensor([[0.0, 9.0], [0.0, 0.0]]), torch.tensor([0.5, 0.4]), 0.8).tolist()
    [1, 0]
    """
    cumulative = (logits.float() / temperature).softmax(-1).cumsum(-1, dtype=torch.float64)
    threshold = uniforms.to(cumulative).unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return drawn.clamp_(max=logits.shape[-1] - 1)


def cut(text: str, stop: Sequence[str]) -> str | None:
    """The text up to and with the stop text that comes first, or None where there is none.

    >>> cut("Why?\\nAnswer: x", ["x", "\\nAnswer:"])
    'Why?\\nAnswer:'
    """
    ends = [(at, at + len(mark)) for mark in stop if (at := text.find(mark)) >= 0]
    return text[: min(ends)[1]] if ends else None


class Reader:
    """Tokens as text: reads a row again only after a token that can complete a stop text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._last = {mark[-1] for mark in stop}
        self._may_end: dict[int, bool] = {}

    def text(self, tokens: Sequence[int]) -> str:
        """The text of a row."""
        return self._decode(tokens)

    def stopped(self, tokens: Sequence[int]) -> str | None:
        """The row's text up to and with its stop text, or None while there is none."""
        token = tokens[-1]
        if token not in self._may_end:
            piece = self._decode([token])
            # A piece of a character decodes to a replacement mark: it may hide anything.
            self._may_end[token] = "\ufffd" in piece or any(mark in piece for mark in self._last)
        return cut(self._decode(tokens), self._stop) if self._may_end[token] else None
