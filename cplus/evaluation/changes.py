"""What was kept, lost and learned, row by row; effects of answer letters; all of it as JSON values."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from string import ascii_uppercase
from typing import Any, Literal, TypeAlias

from cplus.data.examples import Choice, Example, Prediction
from cplus.evaluation.statistics import Rate, share

# Before and after, row by row: Retention, Acquisition, Correction and the flips they are made of.


Kind: TypeAlias = Literal["kept", "lost", "gained", "still_wrong"]
KINDS: dict[tuple[bool, bool], Kind] = {
    (True, True): "kept",
    (True, False): "lost",
    (False, True): "gained",
    (False, False): "still_wrong",
}


Flip: TypeAlias = tuple[str, Kind]
"""A row's id, and what became of its answer."""


def flips(before: Sequence[Prediction], after: Sequence[Prediction]) -> list[Flip]:
    """The flip table, in the order of `before`; both must have answered the same rows."""
    then = {prediction.id: prediction for prediction in after}
    if set(then) != {prediction.id for prediction in before} or len(before) != len(after):
        raise ValueError(
            f"expected predictions of the same rows before and after, got {len(before)} and {len(after)} "
            f"with {len(set(then) & {p.id for p in before})} ids in common"
        )
    return [(was.id, KINDS[was.right, then[was.id].right]) for was in before]


def without(table: Sequence[Flip], ids: Collection[str]) -> list[Flip]:
    """The flips of other rows: anchors are left out so in the composition study.

    Paper: App. "Anchor Composition Across Tasks".
    """
    return [(id, kind) for id, kind in table if id not in ids]


def retention(table: Sequence[Flip]) -> Rate:
    """Pr(correct after | correct before).

    Paper: Experimental Setting, Evaluation.
    """
    return share(kind == "kept" for _, kind in table if kind in ("kept", "lost"))


def acquisition(table: Sequence[Flip]) -> Rate:
    """Pr(correct after | incorrect before), on the rows trained on.

    Paper: Experimental Setting, Evaluation.
    """
    return share(kind == "gained" for _, kind in table if kind in ("gained", "still_wrong"))


def correction(table: Sequence[Flip], anchors: Collection[str]) -> Rate:
    """Pr(correct after | incorrect before) on rows never trained on: the anchors are left out.

    Paper: App. "Anchor Composition Across Tasks".
    """
    return acquisition(without(table, anchors))


def percent(predictions: Sequence[Prediction]) -> float:
    """Overall accuracy, 0 to 100."""
    return share(prediction.right for prediction in predictions).percent


def average_task_accuracy(accuracies: Mapping[str, float]) -> float:
    """The unweighted mean over tasks.

    Paper: Experimental Setting, Evaluation.

    >>> average_task_accuracy({"csqa": 70.0, "arc_c": 80.0})
    75.0
    """
    return statistics.fmean(accuracies.values())


def recovery(retained: float, sft: float, whole: float = 100.0) -> float:
    """The share of SFT's forgetting that a method undoes, in percent: 100 (R - R_SFT) / (whole - R_SFT).

    Paper: App. "Model-Scale Perspective".

    >>> recovery(80.0, 60.0)
    50.0
    """
    if not sft < whole:
        raise ValueError(f"expected an SFT that forgets something (Retention below {whole:g}), got {sft}")
    return 100 * (retained - sft) / (whole - sft)


# Effects of answer letters: figures per gold label, the distribution of answers, evaluation with permuted options.
#
# A model that always answers A keeps every row whose answer is A, so a shifted letter prior looks like forgetting.


def _letter(index: int) -> str:
    """A choice's letter; beyond Z, where no interface asks for letters, its number."""
    return ascii_uppercase[index] if index < len(ascii_uppercase) else str(index + 1)


def rates(outcomes: Iterable[tuple[str, bool]]) -> dict[str, Rate]:
    """The share of right outcomes of each label.

    >>> rates([("B", False), ("A", True), ("B", True)])
    {'A': Rate(right=1, total=1), 'B': Rate(right=1, total=2)}
    """
    groups: dict[str, list[bool]] = defaultdict(list)
    for label, right in outcomes:
        groups[label].append(right)
    return {label: share(groups[label]) for label in sorted(groups)}


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


def permuted(
    predict: Callable[[Sequence[Example]], Sequence[Prediction]], examples: Sequence[Example], interface: str
) -> dict[str, Any]:
    """Evaluate every question once for each cyclic permutation of its options.

    `mean` is the accuracy over all permutations, `consistent` the share of questions answered with the same option
    each time, `averaged` the accuracy of the option with the highest mean probability.
    """
    if interface != "letter":
        raise ValueError(f"permuting options requires the letter interface, got {interface}")
    questions = [example for example in examples if isinstance(example, Choice)]
    rotations = [(q, by) for q in questions for by in range(len(q.choices))]
    predictions = list(predict([rotated(question, by) for question, by in rotations]))
    chosen: dict[str, set[int]] = defaultdict(set)
    weights: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for (question, by), prediction in zip(rotations, predictions, strict=True):
        count, top = len(question.choices), max(prediction.scores)
        assert isinstance(prediction.answer, int)
        chosen[question.id].add((prediction.answer + by) % count)
        likelihoods = [math.exp(score - top) for score in prediction.scores]
        for position, likelihood in enumerate(likelihoods):
            weights[question.id][(position + by) % count] += likelihood / sum(likelihoods)
    return {
        "mean": 100 * statistics.fmean(prediction.right for prediction in predictions),
        "consistent": share(len(chosen[q.id]) == 1 for q in questions).row(),
        "averaged": share(max(own := weights[q.id], key=own.__getitem__) == q.answer for q in questions).row(),
        "answers": answers(predictions),
    }


# How much of a loss is a shifted prior over answers, and how much is lost knowledge of single questions.


def answer_prior(
    before: Sequence[Prediction], after: Sequence[Prediction], examples: Sequence[Example], *, by_letter: bool
) -> dict[str, Any]:
    """Retention by gold answer, and Retention after subtracting each answer's mean change of score.

    An answer is its letter, or its text if the model sees no letters. Scores may change for an answer as a whole (its
    prior) or for single questions (knowledge); `corrected` is the Retention without the change of the prior.
    """
    then, rows = {p.id: p for p in after}, {example.id: example for example in examples}
    known: list[tuple[Prediction, Prediction, Sequence[str]]] = []
    changes: dict[str, list[float]] = defaultdict(list)
    moved: dict[str, int] = defaultdict(int)
    for was in before:
        if not was.right:
            continue
        now, row = then[was.id], rows[was.id]
        if not isinstance(row, Choice):
            raise ValueError(f"the answer prior needs multiple-choice rows, got free text in {row.id!r}")
        offered: Sequence[str] = ascii_uppercase[: len(row.choices)] if by_letter else row.choices
        known.append((was, now, offered))
        moved[offered[int(now.answer)]] += 1
        moved[offered[int(was.answer)]] -= 1
        for answer, old, new in zip(offered, was.scores, now.scores, strict=True):
            changes[answer].append(new - old)
    shifts = {answer: sum(values) / len(values) for answer, values in changes.items()}
    kept: list[tuple[str, bool]] = []
    corrected: list[bool] = []
    for was, now, offered in known:
        right = int(was.answer)  # what was answered right is the right choice
        kept.append((offered[right], now.right))
        scores = [score - shifts[answer] for score, answer in zip(now.scores, offered, strict=True)]
        corrected.append(scores.index(max(scores)) == right)
    found = rates(kept)
    return {
        "retention": 100 * sum(right for _, right in kept) / len(known),
        "macro": sum(rate.percent for rate in found.values()) / len(found),
        "corrected": 100 * sum(corrected) / len(corrected),
        # Half the summed absolute change of the answers' shares: 0 if none is given more or less often.
        "moved": 50 * sum(map(abs, moved.values())) / len(known),
        "labels": {answer: [rate.right, rate.total] for answer, rate in found.items()},
    }


# An evaluation as plain JSON values.


def answered(predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, Any]:
    """Accuracy with its interval; for multiple choice also per gold label, with the number of each answer."""
    summary: dict[str, Any] = {"rows": len(predictions)}
    if all(prediction.correct is not None for prediction in predictions):
        summary["accuracy"] = share(prediction.right for prediction in predictions).row()
    if all(isinstance(example, Choice) for example in examples):
        labels = {example.id: _letter(example.answer) for example in examples if isinstance(example, Choice)}
        found = rates((labels[prediction.id], prediction.right) for prediction in predictions)
        summary |= {
            "labels": {label: rate.row() for label, rate in found.items()},
            "macro": statistics.fmean(rate.percent for rate in found.values()),
            "answers": answers(predictions),
            "gold": dict(sorted(Counter(labels.values()).items())),
        }
        if any(count > 1 for prediction in predictions for count in prediction.num_tokens):
            summary["by_other_rules"] = by_other_rules(predictions, examples)
    return summary


def by_other_rules(predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, float]:
    """Accuracy if choices were compared by their summed log-likelihood, or by the sum per character.

    These are `acc` and `acc_norm` of lm-evaluation-harness; ours is the mean per token.
    """
    right = {"sum": 0, "per_character": 0}
    for prediction, example in zip(predictions, examples, strict=True):
        assert isinstance(example, Choice)
        sums = [mean * count for mean, count in zip(prediction.scores, prediction.num_tokens, strict=True)]
        spread = [total / len(choice) for total, choice in zip(sums, example.choices, strict=True)]
        right["sum"] += sums.index(max(sums)) == example.answer
        right["per_character"] += spread.index(max(spread)) == example.answer
    return {rule: 100 * count / len(predictions) for rule, count in right.items()}
