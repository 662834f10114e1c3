"""The default engine: any causal model of transformers, on the CPU or a GPU, many rows at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from cplus.probes.engine import Reader, Request, Sample, Sampling, pick
from cplus.probes.slots import Prefixes, Slots, chunk_ends, grouped_attention

_SPARE_COLUMNS = 32


@dataclass(slots=True)
class _Row:
    request: Request
    uniforms: list[float]
    tokens: list[int] = field(default_factory=list)


class LocalEngine:
    """Rows that finish are refilled at once; prompts that begin alike are computed once."""

    def __init__(self, model: Any, tokenizer: Any, *, rows: int = 64, prefix_bytes: int = 1 << 30) -> None:
        if rows < 1:
            raise ValueError(f"expected at least one row, got {rows}")
        self._model, self._tokenizer, self._rows = model, tokenizer, rows
        self._pieces: dict[int, str] = {}
        self._prefixes = Prefixes(model, self._ends, max_bytes=prefix_bytes)
        self._eos = _end_tokens(model, tokenizer)

    def describe(self) -> dict[str, Any]:
        """All that decides a float's last bit, and so, rarely, a token."""
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
        if not requests:
            return
        longest = max(len(request.prompt) for request in requests)
        self._check_window(longest + sampling.max_new_tokens)
        # Long prompts first: then the columns in use shrink with the queue.
        queue = deque(sorted(requests, key=lambda request: (-len(request.prompt), request.index)))
        reader = Reader(self._decode, sampling.stop)
        with torch.inference_mode(), grouped_attention(self._model):
            like = self._prefixes.chunks(queue[0].prompt)[0]
        columns = longest + sampling.max_new_tokens + _SPARE_COLUMNS
        slots = Slots(like, rows=min(self._rows, len(requests)), longest=longest, columns=columns)
        rows: list[_Row] = []
        while queue or rows:
            finished: list[Sample] = []
            with torch.inference_mode(), grouped_attention(self._model):
                while (queue or rows) and not finished:
                    finished += self._fill(slots, rows, queue, reader, sampling)
                    if rows:
                        finished += self._step(slots, rows, reader, sampling)
            yield from finished

    def _fill(
        self, slots: Slots, rows: list[_Row], queue: deque[Request], reader: Reader, sampling: Sampling
    ) -> list[Sample]:
        """Give every free slot a request; a first token may already end one."""
        finished = []
        while queue and len(rows) < self._rows:
            request = queue.popleft()
            chunks = self._prefixes.chunks(request.prompt)
            generator = torch.Generator().manual_seed(request.seed)
            uniforms = torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)
            row = _Row(request, uniforms.tolist())
            token = pick(chunks[-1].logits.unsqueeze(0), uniforms[:1], sampling.temperature).item()
            sample = self._take(row, int(token), reader, sampling)
            if sample is not None:
                finished.append(sample)
                continue
            slots.put(len(rows), chunks)
            rows.append(row)
        return finished

    def _step(self, slots: Slots, rows: list[_Row], reader: Reader, sampling: Sampling) -> list[Sample]:
        """One more token for every row; finished rows make room."""
        logits = slots.step(self._model, [row.tokens[-1] for row in rows])
        uniforms = torch.tensor([row.uniforms[len(row.tokens)] for row in rows], dtype=torch.float64)
        drawn = pick(logits, uniforms, sampling.temperature).tolist()
        finished = []
        for at in reversed(range(len(rows))):
            sample = self._take(rows[at], drawn[at], reader, sampling)
            if sample is not None:
                finished.append(sample)
                slots.drop(at)
                rows[at] = rows[-1]
                rows.pop()
        return finished

    def _take(self, row: _Row, token: int, reader: Reader, sampling: Sampling) -> Sample | None:
        """Add a token to a row; its sample, if that ends it."""
        index, drawn = row.request.index, len(row.tokens) + 1
        if token in self._eos:
            return Sample(index=index, text=reader.text(row.tokens), tokens=drawn, end="end of text")
        row.tokens.append(token)
        stopped = reader.stopped(row.tokens)
        if stopped is not None:
            return Sample(index=index, text=stopped, tokens=drawn, end="stop")
        if drawn == sampling.max_new_tokens:
            return Sample(index=index, text=reader.text(row.tokens), tokens=drawn, end="limit")
        return None

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _ends(self, prompt: tuple[int, ...]) -> list[int]:
        for token in prompt:
            if token not in self._pieces:
                self._pieces[token] = self._decode([token])
        return chunk_ends([self._pieces[token] for token in prompt])

    def _check_window(self, needed: int) -> None:
        window = getattr(self._model.config, "max_position_embeddings", None)
        if window is not None and needed > window:
            raise ValueError(
                f"the longest request and its continuation take {needed} tokens, but the model's window is {window}; "
                "use shorter anchors, fewer shots or a lower --max-new-tokens"
            )


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    config = getattr(model, "generation_config", None)
    ids = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    flat = [token for entry in ids for token in (entry if isinstance(entry, list) else [entry])]
    return frozenset(token for token in flat if token is not None)
