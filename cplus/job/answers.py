"""The base model's answers to a job's rows, kept in a file so that a resumed job need not compute them again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from cplus import files
from cplus.data import predictions
from cplus.data.examples import fingerprint
from cplus.evaluation.judges import judge
from cplus.experiment.measure import Answers, evaluate
from cplus.experiment.rows import Group
from cplus.job.settings import AdaptConfig
from cplus.scoring import Score, log_likelihoods


def ask(model: nn.Module, group: Group, config: AdaptConfig, when: str) -> Answers:
    """A group's answers by the job's judge; what a split already knows of the base model is not computed again."""
    what = f"{when}: {group.name}"
    if group.known and when == "before":
        scores = () if group.closed else tuple(log_likelihoods(model, group.encoded(), what=what))
        return Answers(predictions=group.known, scores=scores)
    return evaluate(model, group, judge=judge(config.judge), max_new_tokens=config.max_new_tokens, what=what)


def ask_once(
    path: Path, model: nn.Module, groups: Sequence[Group], config: AdaptConfig, model_fingerprint: str
) -> dict[str, Answers]:
    """The base model's answers to every group, kept in a file so that a resumed job need not ask again."""
    identity = {group.name: fingerprint(group.examples) for group in groups} | {"model": model_fingerprint}
    if path.is_file():
        stored = files.read_json(path)
        if stored["identity"] != identity:
            changed = [name for name in identity if stored["identity"].get(name) != identity[name]]
            raise ValueError(f"the {' and '.join(changed)} changed since the job began; begin a new one")
        return {name: _from_row(row) for name, row in stored["answers"].items()}
    answers = {group.name: ask(model, group, config, "before") for group in groups}
    rows = {name: _to_row(own) for name, own in answers.items()}
    files.write_json(path, {"identity": identity, "answers": rows})
    return answers


def _to_row(answers: Answers) -> dict[str, Any]:
    return {
        "predictions": [predictions.to_row(prediction) for prediction in answers.predictions],
        "scores": [[score.total, score.num_tokens] for score in answers.scores],
    }


def _from_row(row: dict[str, Any]) -> Answers:
    return Answers(
        predictions=tuple(predictions.from_row(own) for own in row["predictions"]),
        scores=tuple(Score(total, count) for total, count in row["scores"]),
    )
