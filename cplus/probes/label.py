"""The frozen model's own answers, by the fixed rule of the interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import nn

from cplus.data.encoded import Encoded
from cplus.data.examples import Example, FreeForm
from cplus.interfaces import Interface, Rejected
from cplus.probes.local import DecodingRow, LocalEngine
from cplus.scoring import log_likelihoods, predict

MAX_ANSWER_TOKENS = {"letter": 1, "cloze": 48, "freeform": 256}
"""Maximum length of a free-text answer, by interface."""


@dataclass(frozen=True, slots=True)
class Label:
    """An example with the frozen model's answer as its target, and the model's confidence in it."""

    example: Example
    confidence: float


Labeller: TypeAlias = Callable[[Sequence[Example]], list[Label | Rejected]]


def label(
    model: nn.Module,
    engine: LocalEngine,
    interface: Interface,
    examples: Sequence[Example],
    *,
    max_tokens: int | None = None,
    cut: bool = False,
) -> list[Label | Rejected]:
    """The most likely candidate if there are candidates, otherwise greedily decoded text.

    Paper: y_j = h_theta0(x_j) in App. C.1. Confidence is the softmax over the candidates, or the geometric mean
    probability of the text's tokens. `max_tokens` replaces the interface's limit on the length of a text; `cut` keeps
    an answer that reaches it. A plain text is its own answer.
    """
    closed = [example for example in examples if interface.candidates(example)]
    chosen = iter(predict(model, interface, closed, what="labelling"))
    texts = [example for example in examples if _is_text(example)]
    own = iter(log_likelihoods(model, [interface.encode(text) for text in texts], what="scoring"))
    asked = [example for example in examples if not interface.candidates(example) and not _is_text(example)]
    written = iter(_written(model, engine, interface, asked, max_tokens, cut=cut))
    labels: list[Label | Rejected] = []
    for example in examples:
        if _is_text(example):
            labels.append(Label(example, math.exp(next(own).mean)))
        elif interface.candidates(example):
            prediction = next(chosen)
            labels.append(Label(interface.with_answer(example, prediction.answer), prediction.confidence))
        else:
            labels.append(next(written))
    return labels


def _written(
    model: nn.Module,
    engine: LocalEngine,
    interface: Interface,
    examples: Sequence[Example],
    max_tokens: int | None,
    *,
    cut: bool,
) -> list[Label | Rejected]:
    prompts = [interface.prompt(example) for example in examples]
    limit = max_tokens or MAX_ANSWER_TOKENS[interface.name]
    rows = engine.greedy(prompts, max_new_tokens=limit, stop=interface.answer_stop)
    scores = log_likelihoods(model, [Encoded(row.prompt, tuple(row.tokens)) for row in rows], what="scoring")
    return [
        _judged(example, row, math.exp(score.mean), interface, cut=cut)
        for example, row, score in zip(examples, rows, scores, strict=True)
    ]


def without_stop(text: str, stop: Sequence[str]) -> str:
    """A decoded answer without the text that ended it."""
    for mark in stop:
        text = text.removesuffix(mark)
    return text.strip()


def _is_text(example: Example) -> bool:
    return isinstance(example, FreeForm) and example.is_text


def _judged(
    example: Example, row: DecodingRow, confidence: float, interface: Interface, *, cut: bool
) -> Label | Rejected:
    text = without_stop(row.text, interface.answer_stop)
    if row.end == "limit" and not cut:
        return Rejected("answer without end")
    if not any(character.isalnum() for character in text):
        return Rejected("empty answer")
    if text.endswith(":") and row.end != "limit":
        return Rejected("answer breaks off")
    answered = interface.with_answer(example, text)
    if row.end == "limit" and isinstance(answered, FreeForm):
        answered = replace(answered, cut=True)
    return Label(answered, confidence)
