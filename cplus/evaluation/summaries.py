"""An evaluation as plain JSON values: one task, and one task before and after."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cplus.data.examples import Choice, Example
from cplus.data.predictions import Prediction
from cplus.evaluation import letters
from cplus.evaluation.retention_acquisition import Flip, acquisition, retention
from cplus.evaluation.statistics import Rate, mcnemar, share


def answered(predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, Any]:
    """Accuracy with its interval; for multiple choice also per gold label, with the number of each answer."""
    summary: dict[str, Any] = {"rows": len(predictions)}
    if all(prediction.correct is not None for prediction in predictions):
        summary["accuracy"] = share(prediction.right for prediction in predictions).row()
    if all(isinstance(example, Choice) for example in examples):
        labels = letters.gold_labels(examples)
        rates = letters.accuracy_by_label(predictions, labels)
        summary |= {
            "labels": _rows(rates),
            "macro": letters.macro(rates),
            "answers": letters.answers(predictions),
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


def compared(table: Sequence[Flip], examples: Sequence[Example]) -> dict[str, Any]:
    """Retention and Acquisition, overall and per gold label, the exact test, and every flip."""
    counts = Counter(flip.kind for flip in table)
    summary: dict[str, Any] = {
        "counts": {kind: counts[kind] for kind in ("kept", "lost", "gained", "still_wrong")},
        "before": share(flip.kind in ("kept", "lost") for flip in table).row(),
        "after": share(flip.kind in ("kept", "gained") for flip in table).row(),
        "mcnemar_p": mcnemar(counts["lost"], counts["gained"]),
        "flips": [flip.row() for flip in table],
    }
    labels = letters.gold_labels(examples)
    for name, metric, by_label, known in (
        ("retention", retention, letters.retention_by_label, counts["kept"] + counts["lost"]),
        ("acquisition", acquisition, letters.acquisition_by_label, counts["gained"] + counts["still_wrong"]),
    ):
        if not known:
            summary[name] = None
            continue
        summary[name] = metric(table).row()
        if labels:
            rates = by_label(table, labels)
            summary[name] |= {"labels": _rows(rates), "macro": letters.macro(rates)}
    return summary


def _rows(rates: dict[str, Rate]) -> dict[str, Any]:
    return {label: rate.row() for label, rate in rates.items()}
