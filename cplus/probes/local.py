"""The default engine: any causal language model of transformers, on the CPU or a GPU, decoding many rows at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor

from cplus.probes.engine import End, Reader, Request, Sample, Sampling, pick
from cplus.probes.key_values import Prefixes, Slots, chunk_ends, grouped_attention

ROWS = 64
"""Rows decoded at once, unless told otherwise."""
_SPARE_COLUMNS = 32


@dataclass(slots=True)
class DecodingRow:
    """One continuation while it is decoded, and what ended it."""

    index: int
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: End | None = None


Choose: TypeAlias = Callable[[Tensor, Sequence[DecodingRow]], list[int]]
"""The next token of each row, from its logits."""


class LocalEngine:
    """Finished rows are replaced immediately; common prefixes of prompts are computed once."""

    def __init__(self, model: Any, tokenizer: Any, *, rows: int = ROWS, prefix_bytes: int = 1 << 30) -> None:
        if rows < 1:
            raise ValueError(f"expected at least one row, got {rows}")
        self._model, self._tokenizer, self._rows = model, tokenizer, rows
        self._pieces: dict[int, str] = {}
        self._prefixes = Prefixes(model, self._ends, max_bytes=prefix_bytes)
        self._eos = _end_tokens(model, tokenizer)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process's engine computes its own prefixes."""
        return LocalEngine._rebuilt, (self._model, self._tokenizer, self._rows)

    @staticmethod
    def _rebuilt(model: Any, tokenizer: Any, rows: int) -> LocalEngine:
        return LocalEngine(model, tokenizer, rows=rows)

    def describe(self) -> dict[str, Any]:
        """Everything that affects the last bit of a float and so, rarely, a token."""
        return {
            "name": "transformers",
            "rows": self._rows,
            "device": self._model.device.type,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        """Yield each request's sample when it is finished."""
        limit = sampling.max_new_tokens
        drawn = {request.index: _uniforms(request.seed, limit) for request in requests}

        def draw(logits: Tensor, rows: Sequence[DecodingRow]) -> list[int]:
            uniforms = torch.tensor([drawn[row.index][len(row.tokens)] for row in rows], dtype=torch.float64)
            tokens: list[int] = pick(logits, uniforms, sampling.temperature).tolist()
            return tokens

        rows = [DecodingRow(request.index, request.prompt) for request in requests]
        for row in self._continued(rows, draw, limit, sampling.stop):
            assert row.end is not None
            yield Sample(index=row.index, text=row.text, tokens=len(row.tokens), end=row.end)

    def greedy(
        self, prompts: Sequence[tuple[int, ...]], *, max_new_tokens: int, stop: Sequence[str]
    ) -> list[DecodingRow]:
        """The most likely token at every position; the first must be text, so that no answer is empty."""

        def most_likely(logits: Tensor, rows: Sequence[DecodingRow]) -> list[int]:
            if not rows[0].tokens:  # first tokens are chosen one row at a time
                logits = logits.index_fill(1, self._blank.to(logits.device), -torch.inf)
            tokens: list[int] = logits.argmax(-1).tolist()
            return tokens

        rows = [DecodingRow(index, prompt) for index, prompt in enumerate(prompts)]
        return sorted(self._continued(rows, most_likely, max_new_tokens, stop), key=lambda row: row.index)

    def _continued(
        self, rows: Sequence[DecodingRow], choose: Choose, limit: int, stop: Sequence[str]
    ) -> Iterator[DecodingRow]:
        """Yield each row when it is finished."""
        if not rows:
            return
        longest = max(len(row.prompt) for row in rows)
        self._check_window(longest + limit)
        # Long prompts first, so that the number of used columns shrinks with the queue.
        queue = deque(sorted(rows, key=lambda row: (-len(row.prompt), row.index)))
        reader = Reader(self._decode, stop)
        with torch.inference_mode(), grouped_attention(self._model):
            like = self._prefixes.chunks(queue[0].prompt)[0]
        slots = Slots(like, rows=min(self._rows, len(rows)), longest=longest, columns=longest + limit + _SPARE_COLUMNS)
        live: list[DecodingRow] = []
        while queue or live:
            finished: list[DecodingRow] = []
            with torch.inference_mode(), grouped_attention(self._model):
                while (queue or live) and not finished:
                    while queue and len(live) < self._rows:
                        finished += self._begin(queue.popleft(), slots, live, choose, reader, limit)
                    if live:
                        finished += self._step(slots, live, choose, reader, limit)
            yield from finished

    def _begin(
        self, row: DecodingRow, slots: Slots, live: list[DecodingRow], choose: Choose, reader: Reader, limit: int
    ) -> list[DecodingRow]:
        """Assign a slot and the first token to a row, which may already end it."""
        chunks = self._prefixes.chunks(row.prompt)
        if self._take(row, choose(chunks[-1].logits.unsqueeze(0), [row])[0], reader, limit):
            return [row]
        slots.put(len(live), chunks)
        live.append(row)
        return []

    def _step(
        self, slots: Slots, live: list[DecodingRow], choose: Choose, reader: Reader, limit: int
    ) -> list[DecodingRow]:
        """One more token for every row; finished rows free their slots."""
        chosen = choose(slots.step(self._model, [row.tokens[-1] for row in live]), live)
        finished = []
        for at in reversed(range(len(live))):
            if self._take(live[at], chosen[at], reader, limit):
                finished.append(live[at])
                slots.drop(at)
                live[at] = live[-1]
                live.pop()
        return finished

    def _take(self, row: DecodingRow, token: int, reader: Reader, limit: int) -> bool:
        """Add a token to a row and return whether that ends it."""
        row.tokens.append(token)
        if token in self._eos:
            row.text, row.end = reader.text(row.tokens[:-1]), "end of text"
        elif (stopped := reader.stopped(row.tokens)) is not None:
            row.text, row.end = stopped, "stop"
        elif len(row.tokens) == limit:
            row.text, row.end = reader.text(row.tokens), "limit"
        return row.end is not None

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._decode([token])
        return self._pieces[token]

    def _ends(self, prompt: tuple[int, ...]) -> list[int]:
        return chunk_ends([self._piece(token) for token in prompt])

    @cached_property
    def _blank(self) -> Tensor:
        """The tokens that cannot begin an answer: blanks, line breaks and special tokens."""
        marks = {*self._eos, *self._tokenizer.all_special_ids}
        texts = {token: self._piece(token).lstrip(" ") for token in range(len(self._tokenizer))}
        return torch.tensor([t for t, text in texts.items() if t in marks or not text.strip() or text[0] == "\n"])

    def _check_window(self, needed: int) -> None:
        window = getattr(self._model.config, "max_position_embeddings", None)
        if window is not None and needed > window:
            raise ValueError(
                f"the longest request and its continuation take {needed} tokens, but the model's window is {window}; "
                "use shorter anchors, fewer shots or a lower --max-new-tokens"
            )


def _uniforms(seed: int, count: int) -> list[float]:
    """The random numbers of one request, one for each token it may draw."""
    generator = torch.Generator().manual_seed(seed)
    numbers: list[float] = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    return numbers


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    config = getattr(model, "generation_config", None)
    ids = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    flat = [token for entry in ids for token in (entry if isinstance(entry, list) else [entry])]
    return frozenset(token for token in flat if token is not None)
