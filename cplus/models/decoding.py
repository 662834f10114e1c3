"""Sampling from many prompts at once, with a key-value cache that rows join and leave."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cplus.base.terminal import track
from cplus.core.rows import shared_prefix
from cplus.models.served import call

T = TypeVar("T")

# A key-value cache for many rows, which can join and leave at any step.


_GROUPED = "cplus_grouped"


class _Layer(DynamicLayer):  # type: ignore[misc]
    """One layer of `Slots`, as the model sees it."""

    def __init__(self, slots: Slots, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized, self._slots = keys, values, True, slots

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, end = self._slots.rows, self._slots.end
        self.keys[:rows, :, end : end + 1] = key_states
        self.values[:rows, :, end : end + 1] = value_states
        seen = slice(self._slots.first, end + 1)
        return self.keys[:rows, :, seen], self.values[:rows, :, seen]

    def get_seq_length(self) -> int:
        return self._slots.end - self._slots.first


class Slots:
    """Rows of different lengths that end at the same column and grow together; rows can join or leave at any step."""

    def __init__(self, like: Cache, *, rows: int, longest: int, columns: int) -> None:
        self.rows, self.end, self._columns = 0, longest, columns
        self.starts: list[int] = []
        # Zeros, not garbage: a masked column has weight 0, and 0 times NaN is NaN.
        self._buffers = [t.new_zeros(rows, t.shape[1], columns, t.shape[-1]) for t in _tensors(like)]
        pairs = zip(self._buffers[::2], self._buffers[1::2], strict=True)
        self.cache = Cache(layers=[_Layer(self, keys, values) for keys, values in pairs])

    @property
    def first(self) -> int:
        """The first column that any row uses."""
        return min(self.starts, default=self.end)

    def join(self, computed: Cache, lengths: Sequence[int]) -> None:
        """Add rows, each the first so many columns of its row in `computed`, with its last at the last used column."""
        for i, length in enumerate(lengths):
            start = self.end - length
            for buffer, own in zip(self._buffers, _tensors(computed), strict=True):
                buffer[self.rows, :, start : self.end] = own[i, :, :length]
            self.starts.append(start)
            self.rows += 1

    def drop(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        self.rows -= 1
        last = self.starts.pop()
        if row == self.rows:
            return
        self.starts[row] = last
        for buffer in self._buffers:
            buffer[row, :, last : self.end] = buffer[self.rows, :, last : self.end]

    def step(self, model: Any, tokens: Sequence[int]) -> Tensor:
        """Append one token to each row and return the logits after it."""
        if self.end == self._columns:
            by = self.first
            for buffer in self._buffers:
                buffer[: self.rows, :, : self.end - by] = buffer[: self.rows, :, by : self.end].clone()
            self.starts, self.end = [start - by for start in self.starts], self.end - by
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


def _tensors(cache: Cache) -> list[Tensor]:
    """Keys and values in turn, layer by layer."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


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
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    rows, heads, length, width = query.shape
    groups = heads // key.shape[1]
    if length > 1 or groups == 1:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return plain
    # One query per head: heads that share keys become the queries of one head.
    shared = query.reshape(rows, key.shape[1], groups, width)
    out = torch.nn.functional.scaled_dot_product_attention(
        shared, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return out.reshape(rows, 1, heads, value.shape[-1]), None


# The interface of sampling engines: their requests and their samples.


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


@dataclass(slots=True)
class DecodingRow:
    """One continuation, up to and including its stop text, while it is decoded and after it.

    `end` is what ended it: a stop text, the model's own end of text, or the token limit. A server's has no tokens.
    """

    index: int
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: End | None = None
    total: float = 0.0
    """The log-likelihood of its tokens, where they are the most likely ones."""


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


# The default engine: any causal language model of transformers, on the CPU or a GPU, decoding many rows at once.


ROWS = 64
"""Rows decoded at once, unless told otherwise."""
_SPARE_COLUMNS = 32
_CANDIDATES = 64
"""Tokens among which the first word of an answer is found."""
_PREFILLED = 4096
"""Tokens of prompts that are computed together."""


Choose: TypeAlias = Callable[[Tensor, Sequence[DecodingRow]], list[int]]
"""The next token of each row, from its logits."""


class LocalEngine:
    """Finished rows are replaced immediately; what all prompts begin with is computed once, the rest in batches."""

    def __init__(self, model: Any, tokenizer: Any, rows: int = ROWS) -> None:
        self._model, self._tokenizer, self._rows = model, tokenizer, rows
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self._eos = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}

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

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[DecodingRow]:
        """Each request's continuation when it is finished."""
        limit = sampling.max_new_tokens
        drawn = {
            request.index: torch.rand(limit, generator=torch.Generator().manual_seed(request.seed), dtype=torch.float64)
            for request in requests
        }

        def draw(logits: Tensor, rows: Sequence[DecodingRow]) -> list[int]:
            uniforms = torch.stack([drawn[row.index][len(row.tokens)] for row in rows])
            tokens: list[int] = pick(logits, uniforms, sampling.temperature).tolist()
            return tokens

        return self._continued([DecodingRow(own.index, own.prompt) for own in requests], draw, limit, sampling.stop)

    def greedy(
        self,
        prompts: Sequence[tuple[int, ...]],
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        word_first: bool = True,
        what: str = "answering",
    ) -> list[DecodingRow]:
        """The most likely token at every position; with `word_first` the first is text, so that no answer is empty."""

        def most_likely(logits: Tensor, rows: Sequence[DecodingRow]) -> list[int]:
            whole = logits.logsumexp(-1)
            first = [i for i, row in enumerate(rows) if not row.tokens] if word_first else []
            if first:
                candidates = logits[first].topk(min(_CANDIDATES, logits.shape[-1])).indices.tolist()
                for i, tokens in zip(first, candidates, strict=True):
                    logits[i, list(takewhile(self._blank, tokens))] = -torch.inf
            best, tokens = logits.max(-1)
            found = torch.stack([tokens.double(), (best - whole).double()]).tolist()  # one wait for the device
            for row, score in zip(rows, found[1], strict=True):
                row.total += score
            return [int(token) for token in found[0]]

        rows = [DecodingRow(index, prompt) for index, prompt in enumerate(prompts)]
        ended = track(self._continued(rows, most_likely, max_new_tokens, stop), what, total=len(rows))
        return sorted(ended, key=lambda row: row.index)

    def _continued(
        self, rows: Sequence[DecodingRow], choose: Choose, limit: int, stop: Sequence[str]
    ) -> Iterator[DecodingRow]:
        """Yield each row when it is finished."""
        if not rows:
            return
        longest = max(len(row.prompt) for row in rows)
        window = getattr(self._model.config, "max_position_embeddings", None)
        if window is not None and longest + limit > window:
            raise ValueError(
                f"the longest request and its continuation take {longest + limit} tokens, but the model's window is "
                f"{window}; use shorter anchors, fewer shots or a lower max_new_tokens"
            )
        # Long prompts first, so that the number of used columns shrinks with the queue.
        queue = deque(sorted(rows, key=lambda row: (-len(row.prompt), row.index)))

        @cache
        def may_stop(token: int) -> bool:
            """Whether a token can complete a stop text; only then a whole row is decoded."""
            piece = self._decode([token])
            # Part of a character decodes to a replacement character, which may hide anything.
            return "\ufffd" in piece or any(mark[-1] in piece for mark in stop)

        # A prompt's last token is the first input of a decoding step.
        shared = shared_prefix([row.prompt for row in rows])
        with torch.inference_mode(), grouped_attention(self._model):
            begun = self._computed(None, [shared]) if shared else None
        slots: Slots | None = None
        live: list[DecodingRow] = []
        while queue or live:
            finished: list[DecodingRow] = []
            with torch.inference_mode(), grouped_attention(self._model):
                while (queue or live) and not finished:
                    while queue and len(live) < self._rows:
                        most = min(self._rows - len(live), max(1, _PREFILLED // len(queue[0].prompt)))
                        joining = [queue.popleft() for _ in range(min(len(queue), most))]
                        computed = self._computed(begun, [row.prompt[len(shared) : -1] for row in joining])
                        if slots is None:
                            columns = longest + limit + _SPARE_COLUMNS
                            slots = Slots(computed, rows=min(self._rows, len(rows)), longest=longest, columns=columns)
                        slots.join(computed, [len(row.prompt) - 1 for row in joining])
                        live += joining
                    assert slots is not None
                    last = [row.tokens[-1] if row.tokens else row.prompt[-1] for row in live]
                    chosen = choose(slots.step(self._model, last), live)
                    for at in reversed(range(len(live))):
                        row, token = live[at], chosen[at]
                        row.tokens.append(token)
                        stopped = cut(self._decode(row.tokens), stop) if may_stop(token) else None
                        if token in self._eos:
                            row.text, row.end = self._decode(row.tokens[:-1]), "end of text"
                        elif stopped is not None:
                            row.text, row.end = stopped, "stop"
                        elif len(row.tokens) == limit:
                            row.text, row.end = self._decode(row.tokens), "limit"
                        if row.end is not None:
                            finished.append(row)
                            slots.drop(at)
                            live[at] = live[-1]
                            live.pop()
            yield from finished

    def _computed(self, begun: Cache | None, tokens: Sequence[tuple[int, ...]]) -> Cache:
        """The keys and values of these tokens after `begun`, padded on the right, where no token sees the padding."""
        width, device, past = max(1, *map(len, tokens)), self._model.device, deepcopy(begun) or DynamicCache()
        past.batch_repeat_interleave(len(tokens))
        first = past.get_seq_length()
        self._model(
            input_ids=torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens], device=device),
            position_ids=torch.arange(first, first + width, device=device).expand(len(tokens), -1),
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
        return past

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _blank(self, token: int) -> bool:
        """Whether a token cannot begin an answer: a blank, a line break or a special token."""
        text = self._decode([token]).lstrip(" ")
        return token in {*self._eos, *self._tokenizer.all_special_ids} or not text.strip() or text[0] == "\n"


# An engine that samples from a vLLM server, for large models or many probes.


class ServerEngine:
    """Sends token prompts, each with its own seed, to the completions endpoint of `vllm serve MODEL`.

    The server samples the inputs; the answers still come from the locally loaded model.
    """

    def __init__(self, url: str, *, parallel: int = 64) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"expected the address of a vLLM server such as http://localhost:8000, got {url!r}")
        self._url, self._parallel = url.rstrip("/").removesuffix("/v1"), parallel
        models = self._call("/v1/models", lambda answer: [model["id"] for model in answer["data"]])
        if len(models) != 1:
            raise ValueError(f"expected a server with one model at {self._url}, but it serves {len(models)}")
        self._model = str(models[0])

    def describe(self) -> dict[str, Any]:
        """The model and version that the server reports; its address does not affect the samples."""
        version = self._call("/version", lambda answer: answer.get("version"))
        return {"name": "vllm", "model": self._model, "version": version}

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[DecodingRow]:
        """Each request's continuation when it is finished."""
        with ThreadPoolExecutor(self._parallel) as pool:
            waiting = [pool.submit(self._complete, request, sampling) for request in requests]
            try:
                for done in as_completed(waiting):
                    yield done.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _complete(self, request: Request, sampling: Sampling) -> DecodingRow:
        body = {
            "model": self._model,
            "prompt": list(request.prompt),
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "max_tokens": sampling.max_new_tokens,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
        }
        text, finish, reason = self._call("/v1/completions", _choice, body)
        # The server names a stop text as the reason, but not the model's own end of text.
        end: End = "limit" if finish == "length" else "stop" if isinstance(reason, str) else "end of text"
        return DecodingRow(request.index, request.prompt, text=text, end=end)

    def _call(self, path: str, read: Callable[[Any], T], body: dict[str, Any] | None = None) -> T:
        try:
            return call(self._url + path, body, read)
        except ConnectionError as error:
            raise ConnectionError(
                f"no vLLM server answers at {self._url}{path} ({error}); start one with 'vllm serve MODEL'"
            ) from error


def _choice(answer: Any) -> tuple[str, str, Any]:
    first = answer["choices"][0]
    return first["text"], first["finish_reason"], first.get("stop_reason")


Engine: TypeAlias = LocalEngine | ServerEngine
"""Continues requests; the same list of requests always gives the same samples, whatever order they finish in."""
