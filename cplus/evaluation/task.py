"""One model on one task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from cplus.base.files import read_json
from cplus.data import examples as stored
from cplus.data.examples import Choice, Example, Prediction, fingerprint
from cplus.data.interfaces import Interface
from cplus.evaluation.changes import answered, compared, flips, permuted, responses
from cplus.evaluation.judges import Judge
from cplus.models.scoring import Score, log_likelihoods, predict

# The evaluation of one model on one task.


@dataclass(frozen=True, kw_only=True)
class BoundTask:
    """A task's rows with their interface, and the judge of free-text answers."""

    name: str
    interface: Interface
    examples: tuple[Example, ...]
    judge: Judge | None


def evaluate_task(
    model: nn.Module, task: BoundTask, *, max_new_tokens: int = 256
) -> tuple[list[Prediction], dict[str, Any]]:
    """The model's answers and their summary; free-form rows are also scored by the likelihood of their responses."""
    predictions = predict(
        model, task.interface, task.examples, judge=task.judge, max_new_tokens=max_new_tokens, what=task.name
    )
    summary: dict[str, Any] = {"task": task.name, "interface": task.interface.name}
    summary |= answered(predictions, task.examples)
    if not isinstance(task.examples[0], Choice):
        rows = [task.interface.encode(example) for example in task.examples]
        scores = log_likelihoods(model, rows, what=f"{task.name}: responses")
        summary["responses"] = responses([score.total for score in scores], [score.num_tokens for score in scores])
    return predictions, summary


def evaluate_permuted(model: nn.Module, task: BoundTask) -> dict[str, Any]:
    """The summary of an evaluation with every cyclic permutation of the options."""
    if task.interface.name != "letter":
        raise ValueError(f"permuting options requires the letter interface, got {task.interface.name}")
    what = f"{task.name}: permuted"
    return permuted(lambda rows: predict(model, task.interface, rows, what=what), task.examples)


def against(path: Path, task: BoundTask, after: Sequence[Prediction]) -> dict[str, Any]:
    """The comparison with predictions stored by `cplus evaluate --split` for the same rows and interface."""
    record = read_json(path)
    try:
        before = [stored.prediction_from_row(row) for row in record["predictions"]]
        known = {"interface": record["interface"], "data_fingerprint": record["data_fingerprint"]}
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected predictions as 'cplus evaluate --split' writes them; {error} is missing"
        ) from error
    expected = {"interface": task.interface.name, "data_fingerprint": fingerprint(task.examples)}
    if known != expected:
        raise ValueError(
            f"{path}: expected predictions of the same rows and interface, {json.dumps(expected)}, "
            f"but they were stored for {json.dumps(known)}"
        )
    return compared(flips(before, after), task.examples)


# The loss of answers that a model gave, under that model or another one.


def score_answers(
    model: nn.Module,
    interface: Interface,
    examples: Sequence[Example],
    answers: Sequence[str],
    *,
    what: str = "scoring",
) -> list[Score | None]:
    """The score of each answer, and of the end of its turn, after its prompt; None for an empty answer.

    Call it for the model before and for the model after with the same answers, those of the model before.
    """
    known = [i for i, answer in enumerate(answers) if answer.strip()]
    rows = [interface.encode(interface.with_answer(examples[i], answers[i])) for i in known]
    found: list[Score | None] = [None] * len(answers)
    for i, score in zip(known, log_likelihoods(model, rows, what=what), strict=True):
        found[i] = score
    return found
