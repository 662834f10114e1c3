"""Effects of answer letters: figures per gold label, the distribution of answers, evaluation with permuted options.

A model that always answers A keeps every row whose answer is A, so a shifted letter prior looks like forgetting.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any

from cplus.data.examples import Choice, Example
from cplus.data.predictions import Prediction
from cplus.evaluation.retention_acquisition import Flip, Kind, acquisition, retention
from cplus.evaluation.statistics import Rate, share


def _letter(index: int) -> str:
    """A choice's letter; beyond Z, where no interface asks for letters, its number."""
    return ascii_uppercase[index] if index < len(ascii_uppercase) else str(index + 1)


def gold_labels(examples: Sequence[Example]) -> dict[str, str]:
    """The letter of the right choice of each multiple-choice row, by id."""
    return {example.id: _letter(example.answer) for example in examples if isinstance(example, Choice)}


def accuracy_by_label(predictions: Sequence[Prediction], labels: Mapping[str, str]) -> dict[str, Rate]:
    """Accuracy on the rows of each gold label."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for prediction in predictions:
        groups[labels[prediction.id]].append(prediction.right)
    return {label: share(groups[label]) for label in sorted(groups)}


def retention_by_label(table: Sequence[Flip], labels: Mapping[str, str]) -> dict[str, Rate]:
    """Retention on the rows of each gold label that has past rows."""
    return {label: retention(own) for label, own in _grouped(table, labels, ("kept", "lost")).items()}


def acquisition_by_label(table: Sequence[Flip], labels: Mapping[str, str]) -> dict[str, Rate]:
    """Acquisition on the rows of each gold label that has new rows."""
    return {label: acquisition(own) for label, own in _grouped(table, labels, ("gained", "still_wrong")).items()}


def _grouped(table: Sequence[Flip], labels: Mapping[str, str], kinds: tuple[Kind, Kind]) -> dict[str, list[Flip]]:
    groups: dict[str, list[Flip]] = defaultdict(list)
    for flip in table:
        if flip.kind in kinds:
            groups[labels[flip.id]].append(flip)
    return dict(sorted(groups.items()))


def macro(rates: Mapping[str, Rate]) -> float:
    """The unweighted mean over labels, 0 to 100.

    >>> macro({"A": Rate(9, 10), "B": Rate(1, 2)})
    70.0
    """
    return statistics.fmean(rate.percent for rate in rates.values())


def answers(predictions: Sequence[Prediction]) -> dict[str, int]:
    """The number of answers per letter."""
    counts = Counter(_letter(p.answer) for p in predictions if isinstance(p.answer, int))
    return dict(sorted(counts.items()))


def rotated(example: Choice, by: int) -> Choice:
    """The same question with its options moved up by `by` positions.

    >>> rotated(Choice(id="q", question="?", choices=("a", "b", "c"), answer=0), 1).choices
    ('b', 'c', 'a')
    """
    count = len(example.choices)
    choices = tuple(example.choices[(i + by) % count] for i in range(count))
    return replace(example, id=f"{example.id}@{by}", choices=choices, answer=(example.answer - by) % count)


@dataclass(frozen=True, kw_only=True)
class Permuted:
    """Accuracy when every option is shown at every letter once."""

    mean: float
    consistent: Rate
    averaged: Rate
    answers: dict[str, int]

    def row(self) -> dict[str, Any]:
        """The JSON row."""
        return {
            "mean": self.mean,
            "consistent": self.consistent.row(),
            "averaged": self.averaged.row(),
            "answers": self.answers,
        }


def permuted(predict: Callable[[Sequence[Example]], Sequence[Prediction]], examples: Sequence[Example]) -> Permuted:
    """Evaluate every question once for each cyclic permutation of its options.

    `mean` is the accuracy over all permutations, `consistent` the share of questions answered with the same option
    each time, `averaged` the accuracy of the option with the highest mean probability.
    """
    questions = [example for example in examples if isinstance(example, Choice)]
    rotations = [(q, by) for q in questions for by in range(len(q.choices))]
    predictions = list(predict([rotated(question, by) for question, by in rotations]))
    chosen: dict[str, set[int]] = defaultdict(set)
    weights: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for (question, by), prediction in zip(rotations, predictions, strict=True):
        count = len(question.choices)
        assert isinstance(prediction.answer, int)
        chosen[question.id].add((prediction.answer + by) % count)
        for position, probability in enumerate(probabilities(prediction)):
            weights[question.id][(position + by) % count] += probability
    return Permuted(
        mean=100 * statistics.fmean(prediction.right for prediction in predictions),
        consistent=share(len(chosen[question.id]) == 1 for question in questions),
        averaged=share(_heaviest(weights[question.id]) == question.answer for question in questions),
        answers=answers(predictions),
    )


def probabilities(prediction: Prediction) -> list[float]:
    """The softmax over the candidates' scores."""
    top = max(prediction.scores)
    weights = [math.exp(score - top) for score in prediction.scores]
    return [weight / sum(weights) for weight in weights]


def _heaviest(weights: Mapping[int, float]) -> int:
    return max(weights, key=lambda option: weights[option])
