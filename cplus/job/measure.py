"""What the model answers before, on the way and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cplus import files
from cplus.data import predictions
from cplus.data.batching import batched
from cplus.data.encoded import Encoded
from cplus.data.examples import fingerprint
from cplus.data.predictions import Prediction
from cplus.evaluation import acquisition, flips, retention
from cplus.evaluation.judges import judge
from cplus.evaluation.outcomes import Flip
from cplus.evaluation.statistics import token_loss
from cplus.experiment.settings import AdaptConfig
from cplus.job.rows import Group
from cplus.losses import target_logits
from cplus.scoring import Score, log_likelihoods, predict


@dataclass(frozen=True, kw_only=True)
class Answers:
    """One group's answers in the order of its rows, and for free text the log-likelihoods of the given responses."""

    predictions: tuple[Prediction, ...]
    scores: tuple[Score, ...] = ()


def ask(model: nn.Module, group: Group, config: AdaptConfig, when: str) -> Answers:
    """Put every row of a group to the model."""
    what = f"{when}: {group.name}"
    given = group.known if when == "before" else ()
    answered = given or tuple(
        predict(
            model,
            group.interface,
            group.examples,
            judge=judge(config.judge),
            max_new_tokens=config.max_new_tokens,
            what=what,
        )
    )
    scores = () if group.closed else tuple(log_likelihoods(model, group.encoded(), what=f"{what}: likelihood"))
    return Answers(predictions=answered, scores=scores)


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


def loss_of(scores: Sequence[Score]) -> float:
    """The mean loss per token of scored responses."""
    return token_loss((score.total, score.num_tokens) for score in scores)


def kept(table: Sequence[Flip]) -> float | None:
    """Retention in percent; None where nothing was right before."""
    return retention(table).percent if any(flip.kind in ("kept", "lost") for flip in table) else None


def learned(table: Sequence[Flip]) -> float | None:
    """Acquisition in percent; None where nothing was wrong before."""
    return acquisition(table).percent if any(flip.kind in ("gained", "still_wrong") for flip in table) else None


_SHARES = {"acquisition": ("acquisition", "new_nll", learned), "retention": ("retention", "past_nll", kept)}


def look(model: nn.Module, groups: Sequence[Group], before: dict[str, Answers]) -> dict[str, float]:
    """What is learned and lost so far: shares where the answers are choices, the responses' loss where they are not."""
    found: dict[str, float] = {}
    for group in groups:
        share, loss, rate = _SHARES[group.part]
        if not group.closed:
            found[loss] = loss_of(log_likelihoods(model, group.encoded(), what=f"so far: {group.name}"))
            continue
        ids = {example.id for example in group.examples}
        was = [prediction for prediction in before[group.name].predictions if prediction.id in ids]
        now = predict(model, group.interface, group.examples, what=f"so far: {group.name}")
        value = rate(flips(was, now))
        if value is not None:
            found[share] = value
    return found


@torch.no_grad()
def says_every_token(model: nn.Module, rows: Sequence[Encoded]) -> bool:
    """Whether each token of every target is the likeliest one after those before it, so that decoding repeats it."""
    for batch in batched(rows):
        logits, labels = target_logits(model, batch)
        if not bool(((logits.argmax(-1) == labels) | (labels == -100)).all()):
            return False
    return True
