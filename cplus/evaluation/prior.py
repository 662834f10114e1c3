"""How much of a loss is a shifted prior over answers, and how much is lost knowledge of single questions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from cplus.data.examples import Choice, Example
from cplus.data.predictions import Prediction
from cplus.evaluation.statistics import Rate


def answer_prior(
    before: Sequence[Prediction], after: Sequence[Prediction], examples: Sequence[Example], *, by_letter: bool
) -> dict[str, Any]:
    """Retention by gold answer, and Retention after subtracting each answer's mean change of score.

    An answer is its letter, or its text if the model sees no letters. Scores may change for an answer as a whole (its
    prior) or for single questions (knowledge); `corrected` is the Retention without the change of the prior.
    """
    then, rows = {p.id: p for p in after}, {example.id: example for example in examples}
    known = [(p, then[p.id], _answers(rows[p.id], by_letter)) for p in before if p.right]
    shifts = mean_shifts(known)
    kept: dict[str, list[bool]] = defaultdict(list)
    corrected: list[bool] = []
    for was, now, answers in known:
        kept[answers[was_gold(was)]].append(now.right)
        scores = [score - shifts[answer] for score, answer in zip(now.scores, answers, strict=True)]
        corrected.append(scores.index(max(scores)) == was.answer)
    rates = {answer: Rate(sum(right), len(right)) for answer, right in sorted(kept.items())}
    return {
        "retention": 100 * sum(map(sum, kept.values())) / len(known),
        "macro": sum(rate.percent for rate in rates.values()) / len(rates),
        "corrected": 100 * sum(corrected) / len(corrected),
        "moved": moved(known),
        "labels": {answer: [rate.right, rate.total] for answer, rate in rates.items()},
    }


def was_gold(prediction: Prediction) -> int:
    """The position of the right choice, which is the answer of a right prediction."""
    assert isinstance(prediction.answer, int)
    return prediction.answer


Known = tuple[Prediction, Prediction, Sequence[str]]


def mean_shifts(known: Sequence[Known]) -> Mapping[str, float]:
    """The mean change of each answer's score over the questions that offer it."""
    changes: dict[str, list[float]] = defaultdict(list)
    for was, now, answers in known:
        for answer, old, new in zip(answers, was.scores, now.scores, strict=True):
            changes[answer].append(new - old)
    return {answer: sum(values) / len(values) for answer, values in changes.items()}


def moved(known: Sequence[Known]) -> float:
    """Half the summed absolute change of the answers' shares, in percent: 0 if none is given more or less often."""
    counts: dict[str, int] = defaultdict(int)
    for was, now, answers in known:
        assert isinstance(was.answer, int)
        assert isinstance(now.answer, int)
        counts[answers[now.answer]] += 1
        counts[answers[was.answer]] -= 1
    return 50 * sum(map(abs, counts.values())) / len(known)


def _answers(example: Example, by_letter: bool) -> Sequence[str]:
    if not isinstance(example, Choice):
        raise ValueError(f"the answer prior needs multiple-choice rows, got free text in {example.id!r}")
    return ascii_uppercase[: len(example.choices)] if by_letter else example.choices
