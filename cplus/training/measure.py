"""Measurement: a model's answers to groups of rows, and how far it has moved from its base."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from cplus.core.losses import target_logits
from cplus.core.rows import Encoded, batched
from cplus.data.examples import Example, FreeForm, Prediction
from cplus.distributed import processes
from cplus.evaluation.changes import Flip, acquisition, flips, retention
from cplus.evaluation.statistics import token_loss
from cplus.models.scoring import Judge, Score, log_likelihoods, predict, repeated
from cplus.training.rows import Group

# Measurement: a model's answers to groups of rows, and what was learned and lost.


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
    answers = predict(
        model,
        group.interface,
        group.examples,
        judge=judge,
        max_new_tokens=max_new_tokens,
        word_first=group.by_base,
        what=what,
    )
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
    return processes.spread(group.examples, partial(answer, model, group.interface))


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
            found[loss] = loss_of(processes.spread(group.encoded(), score))
            continue
        choose = partial(predict, model, group.interface, what=f"so far: {group.name}")
        now = processes.spread(group.examples, choose)
        value = rate(changes(before[group.name].predictions, now))
        if value is not None:
            found[share] = value
    return found


@torch.no_grad()
def repeats_every_token(model: nn.Module, rows: Sequence[Encoded]) -> bool:
    """Whether each token of every target is the likeliest one after those before it, so that decoding repeats it."""
    missed = 0
    for batch in batched(rows[processes.rank() :: processes.size()]):
        logits, labels = target_logits(model, batch)
        if not bool(((logits.argmax(-1) == labels) | (labels == -100)).all()):
            missed = 1
            break
    return processes.largest([missed]) == [0]


# How far a model has moved from its base on the new rows: a known predictor of what it forgets.
#
# KL(base || model) over the next token, at the targets of a few new rows, in nats per token. The base model's likeliest
# tokens are kept apart and all others count as one, so that a reference is small; this can only make the divergence
# smaller. Source: Shenfeld et al. 2025, RL's Razor: forgetting follows this divergence on the new task.


LIKELIEST = 64
"""Tokens of the base model that are compared one by one at each position."""
ROWS = 16
"""New rows on which the divergence is measured."""


@dataclass(frozen=True, kw_only=True)
class BaseRow:
    """A row with the base model's likeliest tokens at each target position and their log-probabilities."""

    row: Encoded
    tokens: Tensor
    logs: Tensor


@torch.no_grad()
def base_rows(model: nn.Module, rows: Sequence[Encoded]) -> list[BaseRow]:
    """What the base model expects at the targets of these rows."""
    found = []
    for batch in batched(rows):
        logits, labels = target_logits(model, batch)
        logs, tokens = logits.log_softmax(-1).topk(min(LIKELIEST, logits.shape[-1]), -1)
        for i, row in enumerate(batch):
            inside = labels[i] != -100
            found.append(BaseRow(row=row, tokens=tokens[i][inside].cpu(), logs=logs[i][inside].double().cpu()))
    return found


def divergence(model: nn.Module, rows: Sequence[BaseRow]) -> float:
    """The mean over all target tokens; the processes of a job compute a share of the rows each."""
    found = processes.spread(rows, partial(_sums, model))
    return sum(total for total, _ in found) / sum(count for _, count in found)


@torch.no_grad()
def _sums(model: nn.Module, rows: Sequence[BaseRow]) -> list[tuple[float, int]]:
    """The summed divergence and the number of tokens of each row."""
    place = {id(own.row): i for i, own in enumerate(rows)}
    found: list[tuple[float, int]] = [(0.0, 0)] * len(rows)
    for batch in batched([own.row for own in rows]):
        logits, labels = target_logits(model, batch)
        for i, row in enumerate(batch):
            own = rows[place[id(row)]]
            logs = logits[i][labels[i] != -100].log_softmax(-1).cpu().double().gather(-1, own.tokens)
            found[place[id(row)]] = (float(_kl(own.logs, logs).sum()), len(own.tokens))
    return found


def _kl(base: Tensor, model: Tensor) -> Tensor:
    """KL at each position from the log-probabilities of some tokens, all others taken as one.

    >>> half = torch.tensor([0.5], dtype=torch.float64).log()
    >>> float(_kl(half, half)), round(float(_kl(half, half / 2)), 3)
    (0.0, 0.094)
    """
    kl = (base.exp() * (base - model)).sum(-1)
    rest, own = (1 - logs.exp().sum(-1) for logs in (base, model))
    smallest = torch.finfo(torch.float32).eps  # what rounding alone leaves
    rest, own = rest.clamp(min=smallest), own.clamp(min=smallest)
    return (kl + rest * (rest / own).log()).clamp(min=0.0)
