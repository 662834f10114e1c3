"""A model's answers, example by example, through an interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from torch import nn

from cplus.data.encoded import Encoded, fit
from cplus.data.examples import Choice, Example, FreeForm
from cplus.data.predictions import Prediction
from cplus.interfaces import Interface
from cplus.interfaces.truncation import longest_row, shortened
from cplus.scoring.decoding import greedy
from cplus.scoring.likelihoods import Score, log_likelihoods, read_targets, score_candidates

Judge: TypeAlias = Callable[[str, Example], bool]
"""Whether a free-text answer to an example is right."""
Policy: TypeAlias = Literal["refuse", "exclude", "truncate"]


def predict(
    model: nn.Module,
    interface: Interface,
    examples: Sequence[Example],
    *,
    judge: Judge | None = None,
    max_new_tokens: int = 256,
    what: str = "predicting",
) -> list[Prediction]:
    """The model's answers in the order of the examples: the most likely candidate, or greedy text if there are none.

    Paper: h_theta in App. C.1; protocol section 1.
    """
    candidates = [interface.candidates(example) for example in examples]
    closed = [i for i, own in enumerate(candidates) if own]
    open_ = [i for i, own in enumerate(candidates) if not own]
    prompts = [interface.prompt(examples[i]) for i in closed]
    scores = score_candidates(model, prompts, [candidates[i] for i in closed], what=what)
    found = {i: chosen(examples[i], own) for i, own in zip(closed, scores, strict=True)}
    if open_:
        questions = [examples[i] for i in open_]
        texts = _written(model, interface, questions, judge=judge, max_new_tokens=max_new_tokens, what=what)
        found.update(zip(open_, texts, strict=True))
    return [found[i] for i in range(len(examples))]


def repeated(
    model: nn.Module, interface: Interface, examples: Sequence[Example], *, what: str = "predicting"
) -> list[Prediction]:
    """Whether the model's greedy answer equals each row's response, token for token, from one pass without decoding.

    The answer is the response if they are equal, otherwise empty, because the model's own text is not known. The score
    is the response's mean token log-likelihood.
    """
    readings = read_targets(model, [interface.encode(example) for example in examples], what=what)
    return [
        Prediction(
            id=example.id,
            answer=example.response if reading.likeliest and isinstance(example, FreeForm) else "",
            correct=reading.likeliest,
            confidence=math.exp(reading.score.mean),
            scores=(reading.score.mean,),
            num_tokens=(reading.score.num_tokens,),
        )
        for example, reading in zip(examples, readings, strict=True)
    ]


def fitting(interface: Interface, examples: Sequence[Example], window: int, policy: Policy) -> list[Example]:
    """The examples that fit the window with their longest answer; longer ones are refused, excluded or truncated."""
    if policy == "truncate":
        return [_truncated(interface, example, window) for example in examples]
    rows = [longest_row(interface, example) for example in examples]
    return [examples[i] for i in fit(rows, window, policy).kept]


def _truncated(interface: Interface, example: Example, window: int) -> Example:
    if (found := shortened(interface, example, window)) is None:
        raise ValueError(
            f"{example.id}: expected a row that fits {window} tokens once its prompt is cut, but what may not be cut "
            f"is longer (the whole row has {len(longest_row(interface, example)) - 1}); shorten its answer, or exclude "
            "rows that are too long"
        )
    return found


def chosen(example: Example, scores: tuple[Score, ...]) -> Prediction:
    """The candidate with the highest mean token log-likelihood; the first one if several are equal."""
    assert isinstance(example, Choice)
    means = [score.mean for score in scores]
    best = max(range(len(means)), key=means.__getitem__)
    return Prediction(
        id=example.id,
        answer=best,
        correct=best == example.answer,
        confidence=1 / sum(math.exp(mean - means[best]) for mean in means),
        scores=tuple(means),
        num_tokens=tuple(score.num_tokens for score in scores),
    )


def _written(
    model: nn.Module,
    interface: Interface,
    examples: Sequence[Example],
    *,
    judge: Judge | None,
    max_new_tokens: int,
    what: str,
) -> list[Prediction]:
    """Greedy free-text answers, each with the mean log-likelihood of its own tokens."""
    prompts = [interface.prompt(example) for example in examples]
    generated = greedy(
        model, interface.tokenizer, prompts, max_new_tokens=max_new_tokens, stop=interface.answer_stop, what=what
    )
    rows = [Encoded(prompt, answer.tokens) for prompt, answer in zip(prompts, generated, strict=True)]
    scores = log_likelihoods(model, rows, what=f"{what}: scoring")
    return [
        Prediction(
            id=example.id,
            answer=answer.text.strip(),
            correct=None if judge is None else judge(answer.text.strip(), example),
            confidence=math.exp(score.mean),
            scores=(score.mean,),
            num_tokens=(score.num_tokens,),
        )
        for example, answer, score in zip(examples, generated, scores, strict=True)
    ]
