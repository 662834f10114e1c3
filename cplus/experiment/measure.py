"""Measurement: a model's answers to groups of rows, and what was learned and lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from cplus import world
from cplus.data.batching import batched
from cplus.data.encoded import Encoded
from cplus.data.examples import Example, FreeForm
from cplus.data.predictions import Prediction
from cplus.evaluation import acquisition, flips, retention
from cplus.evaluation.retention_acquisition import Flip
from cplus.evaluation.statistics import token_loss
from cplus.experiment.rows import Group
from cplus.losses import target_logits
from cplus.scoring import Judge, Score, log_likelihoods, predict, repeated


@dataclass(frozen=True, kw_only=True)
class GroupAnswers:
    """One group's answers in the order of its rows, and for free text the log-likelihoods of the given responses."""

    predictions: tuple[Prediction, ...]
    scores: tuple[Score, ...] = ()
    base_answers: tuple[Score | None, ...] = ()
    """Free text: the log-likelihoods of the base model's own answers; None for an empty one."""


def evaluate(
    model: nn.Module, group: Group, *, judge: Judge | None = None, max_new_tokens: int = 256, what: str = "evaluating"
) -> GroupAnswers:
    """The model's answers to every row of a group; for free text also the likelihood of the given responses."""
    answers = predict(model, group.interface, group.examples, judge=judge, max_new_tokens=max_new_tokens, what=what)
    scores = () if group.closed else tuple(log_likelihoods(model, group.encoded(), what=f"{what}: likelihood"))
    return GroupAnswers(predictions=tuple(answers), scores=scores)


def evaluate_texts(model: nn.Module, group: Group, *, what: str = "evaluating") -> GroupAnswers:
    """The likelihoods of plain texts, or of answers that are the model's own; nothing is generated."""
    scores = tuple(log_likelihoods(model, group.encoded(), what=what))
    pairs = zip(group.examples, scores, strict=True)
    return GroupAnswers(
        predictions=tuple(unjudged(example, response_of(example), score) for example, score in pairs),
        scores=scores,
        base_answers=scores,
    )


def unjudged(example: Example, answer: str, score: Score) -> Prediction:
    """An answer in free text that nobody judges, with this likelihood."""
    return Prediction(
        id=example.id,
        answer=answer,
        correct=None,
        confidence=math.exp(score.mean),
        scores=(score.mean,),
        num_tokens=(score.num_tokens,),
    )


def response_of(example: Example) -> str:
    """The given response of a row in free text."""
    assert isinstance(example, FreeForm)
    return example.response


def answered(model: nn.Module, group: Group) -> list[Prediction]:
    """A study's answers: the model's choices, or for free text whether it repeats the responses token by token."""
    answer = predict if group.closed else repeated
    return world.spread(group.examples, partial(answer, model, group.interface))


def changes(before: Sequence[Prediction], after: Sequence[Prediction]) -> list[Flip]:
    """The flips of the rows in `after`; `before` may hold more rows."""
    ids = {prediction.id for prediction in after}
    return flips([prediction for prediction in before if prediction.id in ids], after)


def loss_of(scores: Sequence[Score]) -> float:
    """The mean loss per token of scored responses."""
    return token_loss((score.total, score.num_tokens) for score in scores)


def kept(table: Sequence[Flip]) -> float | None:
    """Retention in percent; None where nothing was right before."""
    return retention(table).percent if any(flip.kind in ("kept", "lost") for flip in table) else None


def learned(table: Sequence[Flip]) -> float | None:
    """Acquisition in percent; None where nothing was wrong before."""
    return acquisition(table).percent if any(flip.kind in ("gained", "still_wrong") for flip in table) else None


_FIGURES = {
    "acquisition": ("acquisition", "new_nll", learned),
    "validation": ("validation", "validation_nll", learned),
    "retention": ("retention", "past_nll", kept),
}
"""The names of a group's share and loss in a curve, and how the share is computed."""


def curve_figures(model: nn.Module, groups: Sequence[Group], before: dict[str, GroupAnswers]) -> dict[str, float]:
    """Figures for the curve: shares for multiple choice, the loss of the given responses for free text."""
    found: dict[str, float] = {}
    for group in groups:
        share, loss, rate = _FIGURES[group.part]
        if not group.closed:
            score = partial(log_likelihoods, model, what=f"so far: {group.name}")
            found[loss] = loss_of(world.spread(group.encoded(), score))
            continue
        choose = partial(predict, model, group.interface, what=f"so far: {group.name}")
        now = world.spread(group.examples, choose)
        value = rate(changes(before[group.name].predictions, now))
        if value is not None:
            found[share] = value
    return found


@torch.no_grad()
def repeats_every_token(model: nn.Module, rows: Sequence[Encoded]) -> bool:
    """Whether each token of every target is the likeliest one after those before it, so that decoding repeats it."""
    missed = 0
    for batch in batched(rows[world.rank() :: world.size()]):
        logits, labels = target_logits(model, batch)
        if not bool(((logits.argmax(-1) == labels) | (labels == -100)).all()):
            missed = 1
            break
    return world.largest([missed]) == [0]
