"""The frozen model's own answers, by the interface's fixed rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from cplus.data.encoded import Encoded
from cplus.data.examples import Example
from cplus.interfaces import Interface, Rejected
from cplus.scoring import greedy, log_likelihoods, predict

MAX_ANSWER_TOKENS = {"letter": 1, "cloze": 32, "freeform": 256}
"""How long an answer in free text may get, by interface."""


@dataclass(frozen=True, slots=True)
class Label:
    """An example with the frozen model's answer as its target, and how sure the model is of it."""

    example: Example
    confidence: float


Labeller: TypeAlias = Callable[[Sequence[Example]], list[Label | Rejected]]


def label(model: nn.Module, interface: Interface, examples: Sequence[Example]) -> list[Label | Rejected]:
    """The likeliest candidate where there are candidates, greedy text where there are none.

    Paper: y_j = h_theta0(x_j) in App. C.1. Confidence is the softmax over the candidates, or the geometric mean
    probability of the text's tokens.
    """
    closed = [example for example in examples if interface.candidates(example)]
    chosen = iter(predict(model, interface, closed, what="labelling"))
    said = iter(_spoken(model, interface, [example for example in examples if not interface.candidates(example)]))
    labels: list[Label | Rejected] = []
    for example in examples:
        if interface.candidates(example):
            prediction = next(chosen)
            labels.append(Label(interface.with_answer(example, prediction.answer), prediction.confidence))
        else:
            labels.append(next(said))
    return labels


def _spoken(model: nn.Module, interface: Interface, examples: Sequence[Example]) -> list[Label | Rejected]:
    prompts = [interface.prompt(example) for example in examples]
    answers = greedy(
        model,
        interface.tokenizer,
        prompts,
        max_new_tokens=MAX_ANSWER_TOKENS[interface.name],
        stop=interface.answer_stop,
        what="labelling",
    )
    rows = [Encoded(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
    labels: list[Label | Rejected] = []
    for example, answer, score in zip(examples, answers, log_likelihoods(model, rows, what="confidence"), strict=True):
        if not answer.finished:
            labels.append(Rejected("answer without end"))
        elif not answer.text.strip():
            labels.append(Rejected("empty answer"))
        else:
            labels.append(Label(interface.with_answer(example, answer.text.strip()), math.exp(score.mean)))
    return labels
