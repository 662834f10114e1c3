"""What was kept, lost and learned, row by row; effects of answer letters; all of it as JSON values."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One row before and after."""

    id: str
    kind: Kind
    before: int | str
    after: int | str
    confidence_before: float
    confidence_after: float


def flips(before: Sequence[Prediction], after: Sequence[Prediction]) -> list[Flip]:
    """The flip table, in the order of `before`; both must have answered the same rows."""
    then = {prediction.id: prediction for prediction in after}
    if set(then) != {prediction.id for prediction in before} or len(before) != len(after):
        raise ValueError(
            f"expected predictions of the same rows before and after, got {len(before)} and {len(after)} "
            f"with {len(set(then) & {p.id for p in before})} ids in common"
        )
    return [
        Flip(
            id=was.id,
            kind=KINDS[was.right, then[was.id].right],
            before=was.answer,
            after=then[was.id].answer,
            confidence_before=was.confidence,
            confidence_after=then[was.id].confidence,
        )
        for was in before
    ]


def without(table: Sequence[Flip], ids: Collection[str]) -> list[Flip]:
    """The flips of other rows: anchors are left out so in the composition study.

    Paper: App. "Anchor Composition Across Tasks".
    """
    return [flip for flip in table if flip.id not in ids]


def retention(table: Sequence[Flip]) -> Rate:
    """Pr(correct after | correct before).

    Paper: Experimental Setting, Evaluation.
    """
    return share(flip.kind == "kept" for flip in table if flip.kind in ("kept", "lost"))


def acquisition(table: Sequence[Flip]) -> Rate:
    """Pr(correct after | incorrect before), on the rows trained on.

    Paper: Experimental Setting, Evaluation.
    """
    return share(flip.kind == "gained" for flip in table if flip.kind in ("gained", "still_wrong"))


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
    if not accuracies:
        raise ValueError("expected the accuracy of at least one task, got none")
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


def gold_labels(examples: Sequence[Example]) -> dict[str, str]:
    """The letter of the right choice of each multiple-choice row, by id."""
    return {example.id: _letter(example.answer) for example in examples if isinstance(example, Choice)}


def rates(outcomes: Iterable[tuple[str, bool]]) -> dict[str, Rate]:
    """The share of right outcomes of each label.

    >>> rates([("B", False), ("A", True), ("B", True)])
    {'A': Rate(right=1, total=1), 'B': Rate(right=1, total=2)}
    """
    groups: dict[str, list[bool]] = defaultdict(list)
    for label, right in outcomes:
        groups[label].append(right)
    return {label: share(groups[label]) for label in sorted(groups)}


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


def permuted(
    predict: Callable[[Sequence[Example]], Sequence[Prediction]], examples: Sequence[Example]
) -> dict[str, Any]:
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
    return {
        "mean": 100 * statistics.fmean(prediction.right for prediction in predictions),
        "consistent": share(len(chosen[q.id]) == 1 for q in questions).row(),
        "averaged": share(max(own := weights[q.id], key=own.__getitem__) == q.answer for q in questions).row(),
        "answers": answers(predictions),
    }


def probabilities(prediction: Prediction) -> list[float]:
    """The softmax over the candidates' scores."""
    top = max(prediction.scores)
    weights = [math.exp(score - top) for score in prediction.scores]
    return [weight / sum(weights) for weight in weights]


# How much of a loss is a shifted prior over answers, and how much is lost knowledge of single questions.


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
    kept: list[tuple[str, bool]] = []
    corrected: list[bool] = []
    for was, now, answers in known:
        assert isinstance(was.answer, int)
        kept.append((answers[was.answer], now.right))  # what was answered right is the right choice
        scores = [score - shifts[answer] for score, answer in zip(now.scores, answers, strict=True)]
        corrected.append(scores.index(max(scores)) == was.answer)
    found = rates(kept)
    return {
        "retention": 100 * sum(right for _, right in kept) / len(known),
        "macro": sum(rate.percent for rate in found.values()) / len(found),
        "corrected": 100 * sum(corrected) / len(corrected),
        "moved": moved(known),
        "labels": {answer: [rate.right, rate.total] for answer, rate in found.items()},
    }


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


# An evaluation as plain JSON values.


def answered(predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, Any]:
    """Accuracy with its interval; for multiple choice also per gold label, with the number of each answer."""
    summary: dict[str, Any] = {"rows": len(predictions)}
    if all(prediction.correct is not None for prediction in predictions):
        summary["accuracy"] = share(prediction.right for prediction in predictions).row()
    if all(isinstance(example, Choice) for example in examples):
        labels = gold_labels(examples)
        found = rates((labels[prediction.id], prediction.right) for prediction in predictions)
        summary |= {
            "labels": {label: rate.row() for label, rate in found.items()},
            "macro": macro(found),
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


def responses(totals: Sequence[float], counts: Sequence[int]) -> dict[str, Any]:
    """The likelihood of the given responses under the model: log-likelihood per token and per response."""
    tokens = sum(counts)
    mean = sum(totals) / tokens
    return {
        "tokens": tokens,
        "log_likelihood_per_token": mean,
        "perplexity": math.exp(-mean),
        "log_likelihood_per_response": sum(totals) / len(totals),
    }
