"""Batched greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from cplus.losses import left_padded
from cplus.scoring.batches import bare, check_window, decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The generated text, its tokens including the end token, and whether the model ended it before the limit."""

    text: str
    tokens: tuple[int, ...]
    finished: bool


@torch.inference_mode()
def greedy(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    what: str = "answering",
) -> list[Generation]:
    """The greedy continuation of each prompt, up to a stop text, the end of text or the limit."""
    check_window(model, [len(prompt) + max_new_tokens - 1 for prompt in prompts])
    plain: Any = bare(model)
    ends = _end_tokens(plain, tokenizer)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )
    generated: list[Generation] = [Generation(text="", tokens=(), finished=False)] * len(prompts)
    lengths = [len(prompt) + max_new_tokens for prompt in prompts]
    for batch in decoded(model, lengths, what):
        inputs = left_padded([prompts[i] for i in batch], next(plain.parameters()).device)
        width = inputs["input_ids"].shape[1]
        stopping = StoppingCriteriaList([_StopTexts(tokenizer, tuple(stop), width)])
        # generate() computes positions from the mask itself.
        rows = plain.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            generation_config=config,
            stopping_criteria=stopping,
        )
        for index, row in zip(batch, rows[:, width:].tolist(), strict=True):
            generated[index] = _read(tokenizer, row, ends, stop)
    return generated


class _StopTexts(StoppingCriteria):  # type: ignore[misc]
    """Ends a row whose new text contains a stop text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], width: int) -> None:
        self._tokenizer, self._stop, self._width = tokenizer, stop, width
        # A token has at least one byte, and a character at most four.
        self._reach = 4 * max(map(len, stop), default=0)

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **_: Any) -> Tensor:
        tails = input_ids[:, max(self._width, input_ids.shape[1] - self._reach) :].tolist() if self._stop else []
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=False)
        done = [any(mark in text for mark in self._stop) for text in texts] or [False] * len(input_ids)
        return torch.tensor(done, device=input_ids.device)


def _read(tokenizer: PreTrainedTokenizerBase, row: list[int], ends: list[int], stop: Sequence[str]) -> Generation:
    """The new tokens of one row as text, up to the stop text or the end of text, whichever comes first."""
    ended = next((i for i, token in enumerate(row) if token in ends), None)
    text = str(tokenizer.decode(row[:ended], skip_special_tokens=False))
    cut = min((text.index(mark) for mark in stop if mark in text), default=None)
    if cut is not None:
        # After a stop text there is only padding, which is a token of `ends`.
        return Generation(text=text[:cut], tokens=tuple(row[:ended]), finished=True)
    tokens = row if ended is None else row[: ended + 1]
    return Generation(text=text, tokens=tuple(tokens), finished=ended is not None)


def _end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a text, according to the tokenizer or to the model's generation settings."""
    own = model.generation_config.eos_token_id
    known = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    ends = sorted({token for token in known if token is not None})
    if not ends:
        raise ValueError("expected a tokenizer or a model with an end-of-text token, found none in either")
    return ends
