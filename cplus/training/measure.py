"""Measurement: a model's answers to groups of rows, how far it has moved from its base, and checks while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from cplus.core.losses import target_logits
from cplus.core.rows import ZERO_EVIDENCE, Encoded, batched
from cplus.data.examples import FreeForm, Prediction
from cplus.distributed import processes
from cplus.evaluation.changes import Flip, acquisition, flips, retention
from cplus.evaluation.statistics import token_loss
from cplus.models import scoring
from cplus.models.scoring import Judge, Score, log_likelihoods, predict
from cplus.training.rows import Group

# A model's answers to groups of rows, and what was learned and lost.


@dataclass(frozen=True, kw_only=True)
class GroupAnswers:
    """One group's answers, and for free text the log-likelihoods of the given responses, in the order of its rows.

    A row that the model was not asked has no answer.
    """

    predictions: tuple[Prediction, ...]
    scores: tuple[Score, ...] = ()


def evaluate(
    model: nn.Module, group: Group, *, judge: Judge | None = None, max_new_tokens: int = 256, what: str = "evaluating"
) -> GroupAnswers:
    """The model's answers to every row of a group; for free text also the likelihood of the given responses."""
    ask = partial(predict, judge=judge, max_new_tokens=max_new_tokens, word_first=group.by_base, what=what)
    answers = ask(model, group.interface, group.examples)
    scores = () if group.closed else tuple(log_likelihoods(model, group.encoded(), what=f"{what}: likelihood"))
    return GroupAnswers(predictions=tuple(answers), scores=scores)


def evaluate_texts(model: nn.Module, group: Group, *, what: str = "evaluating") -> GroupAnswers:
    """The likelihoods of answers that are the model's own; nothing is generated or judged."""
    scores = tuple(log_likelihoods(model, group.encoded(), what=what))
    pairs = zip(group.examples, scores, strict=True)
    predictions = [scoring.spoken(row, row.response, None, score) for row, score in pairs if isinstance(row, FreeForm)]
    return GroupAnswers(predictions=tuple(predictions), scores=scores)


def answered(model: nn.Module, group: Group) -> list[Prediction]:
    """A study's answers: the model's choices, or for free text whether it repeats the responses token by token."""
    answer = predict if group.closed else scoring.repeated
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
    return retention(table).percent if any(kind in ("kept", "lost") for _, kind in table) else None


def learned(table: Sequence[Flip]) -> float | None:
    """Acquisition in percent; None where nothing was wrong before."""
    return acquisition(table).percent if any(kind in ("gained", "still_wrong") for _, kind in table) else None


FIGURES = {
    "acquisition": ("acquisition", "new_nll", learned),
    "validation": ("validation", "validation_nll", learned),
    "retention": ("retention", "past_nll", kept),
}
"""The names of a group's share and loss in a curve, and how the share is computed."""


def curve_figures(model: nn.Module, groups: Sequence[Group], before: dict[str, GroupAnswers]) -> dict[str, float]:
    """Figures for the curve: shares for multiple choice, the loss of the given responses for free text."""
    found: dict[str, float] = {}
    for group in groups:
        share, loss, rate = FIGURES[group.part]
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
    found = (target_logits(model, batch) for batch in batched(rows[processes.rank() :: processes.size()]))
    repeated = all(bool(((logits.argmax(-1) == labels) | (labels == -100)).all()) for logits, labels in found)
    return processes.largest([int(not repeated)]) == [0]


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


def divergences(model: nn.Module, rows: Sequence[BaseRow]) -> list[float]:
    """The mean of each row."""
    return [total / count for total, count in processes.spread(rows, partial(_sums, model))]


@torch.no_grad()
def _sums(model: nn.Module, rows: Sequence[BaseRow]) -> list[tuple[float, int]]:
    """The summed divergence and the number of tokens of each row."""
    of = {id(base.row): base for base in rows}
    found = {}
    for batch in batched([base.row for base in rows]):
        logits, labels = target_logits(model, batch)
        for i, row in enumerate(batch):
            base = of[id(row)]
            logs = logits[i][labels[i] != -100].log_softmax(-1).cpu().double().gather(-1, base.tokens)
            found[id(row)] = (float(_kl(base.logs, logs).sum()), len(base.tokens))
    return [found[id(base.row)] for base in rows]


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


# Checks of the numbers during training: each problem is reported in one sentence when it first shows.


WINDOW = 8
"""Number of updates whose mean loss is checked."""
WORST = 15.0
"""Nats per token: worse than guessing among three million words."""
UNIFORM = 50
"""Number of updates after which a mask that is the same everywhere is no coincidence."""
PATIENCE = 3
"""Number of evaluations without progress after which learning has stalled."""


_LEARNED = {"acquisition": 100.0, "new_nll": -0.05, "loss": -0.05}
"""The measures of progress, in order of preference, and the value that counts as learned; larger is better."""


class Exploded(ArithmeticError):
    """The loss grew beyond what training can explain."""


@dataclass(kw_only=True)
class Health:
    """What was observed so far, in plain values that a checkpoint can store; `said` holds each warning once.

    An exploding loss raises an error; any other check returns a warning or None, and training continues.
    """

    first: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    uniform: int = 0
    share: float = -1.0
    measure: str = ""
    seen: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def stepped(self, step: int, loss: float) -> None:
        """One update's loss.

        >>> health = Health()
        >>> for step in range(1, 9): health.stepped(step, 1.0)
        >>> health.stepped(9, 40.0)
        Traceback (most recent call last):
        ...
        cplus.training.measure.Exploded: the loss exploded: a mean of 5.875 over the last 8 updates at step 9, after \
1.000 at the first. Lower the learning rate, clip the gradient or check the rows
        """
        if len(self.first) < WINDOW:
            self.first.append(loss)
        self.recent = [*self.recent[1 - WINDOW :], loss]
        now, bound = sum(self.recent) / len(self.recent), explosion(self.first)
        if now > bound:
            raise Exploded(
                f"the loss exploded: a mean of {now:.3f} over the last {len(self.recent)} updates at step {step}, "
                f"after {self.first[0]:.3f} at the first. Lower the learning rate, clip the gradient or check the rows"
            )

    def refreshed(self, norm: float) -> str | None:
        """Check the norm of the evidence: zero evidence protects nothing."""
        return None if norm > 0.0 else self._once(ZERO_EVIDENCE)

    def gated(self, admitted: float, steps: int) -> str | None:
        """Check the share of coordinates that the masks of the last `steps` updates admitted."""
        self.uniform = steps + (self.uniform if admitted == self.share else 0)
        self.share = admitted
        if admitted not in (0.0, 1.0) or self.uniform < UNIFORM:
            return None
        if admitted == 0.0:
            return self._once(
                f"The gate blocked every coordinate for {UNIFORM} updates: nothing is learned. Check that new rows "
                "and anchors are not the same questions with different answers."
            )
        return self._once(
            f"The gate admitted every coordinate for {UNIFORM} updates: this is plain fine-tuning. Check that the loss "
            "of the anchors and probes depends on the trained weights."
        )

    def evaluated(self, point: Mapping[str, float]) -> str | None:
        """Check the results of an epoch: whether the new rows are still being learned."""
        name, order = next((name for name in _LEARNED if name in point), None), list(_LEARNED)
        if name is None or (self.measure and order.index(name) > order.index(self.measure)):
            return None  # this epoch was not evaluated as the others were
        if name != self.measure:
            self.measure, self.seen = name, []
        self.seen = [*self.seen[-PATIENCE:], point[name] if name == "acquisition" else -point[name]]
        if len(self.seen) <= PATIENCE or max(self.seen[1:]) > self.seen[0] or self.seen[-1] >= _LEARNED[name]:
            return None
        shown = f"Acquisition is {point[name]:.1f} %" if name == "acquisition" else f"the loss is {point[name]:.3f}"
        when = f" after epoch {point['epoch']:g}" if "epoch" in point else ""
        return self._once(
            f"Learning stalled: {shown}{when} and has not improved in the last {PATIENCE} evaluations. Raise the "
            "learning rate, or check that the new rows do not contradict the anchors or each other."
        )

    def _once(self, sentence: str) -> str | None:
        """The sentence, or None if one with the same beginning was returned before."""
        if any(earlier.split(":")[0] == sentence.split(":")[0] for earlier in self.said):
            return None
        self.said.append(sentence)
        return sentence


def explosion(first: Sequence[float]) -> float:
    """The mean loss, in nats per token, above which a run that began with these losses has exploded.

    >>> explosion([1.0] * WINDOW), explosion([1.0, 700.0]), explosion([9.0])
    (5.0, 15.0, 27.0)
    """
    return 3.0 * median(first) + 2.0 if len(first) >= WINDOW else max(WORST, 3.0 * first[0])
