"""`cplus receipt`: what two models answer to the same rows, side by side on one page."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cplus import models
from cplus.base.environment import environment
from cplus.base.terminal import clean, console, output, print_json
from cplus.cli import options as names
from cplus.cli.options import EVALUATION, Json, Require, given, with_settings
from cplus.data import interfaces
from cplus.data.examples import Example, Prediction
from cplus.data.readers import ENDINGS
from cplus.data.tasks import Task, load_task
from cplus.evaluation.judges import Judge
from cplus.evaluation.judges import judge as judge_of
from cplus.evaluation.requirements import Measured, Requirement, parse, possible, sentence
from cplus.jobs.settings import AdaptConfig, settings
from cplus.receipts.page import (
    PAGE,
    Losses,
    ModelId,
    Receipt,
    RowSet,
    read_receipt,
    rows,
    to_json,
    write_receipt,
)
from cplus.receipts.verdict import lead, sentences

if TYPE_CHECKING:
    from cplus.models.scoring import Score


@with_settings(("judge",), EVALUATION)
def receipt(
    before: Annotated[str | None, typer.Argument(help="The model before: hub id, folder, GGUF file or name.")] = None,
    after: Annotated[str | None, typer.Argument(help="The model after.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Rows to evaluate both on: a file or a named task; repeatable.", autocompletion=names.tasks),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for receipt.html and receipt.json.")] = Path("receipt"),
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of each data set.")] = None,
    require: Require = None,
    verify: Annotated[Path | None, typer.Option(help="Check the receipt in a folder and do nothing else.")] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Evaluate two models on the same rows and write what changed as one page, or verify a receipt."""
    if verify is not None:
        _show(to_json(read_receipt(verify)), verify / PAGE, json=json)
        return
    if before is None or after is None or not data:
        raise ValueError("expected two models and --data, or --verify and a folder; see 'cplus receipt --help'")
    config = settings({"model": before, "split": data[0], **given(options, EVALUATION)})
    asking = Asking(
        tasks=_named([load_task(name, config.data_dir) for name in data]),
        limit=limit,
        judge=judge_of(config.judge),
        config=config,
    )
    requirements = tuple(parse(text) for text in require or ())
    _check(requirements, asking)
    record = write_receipt(_compare(before, after, asking, requirements), out)
    _show(record, out / PAGE, json=json)
    if not all(one["met"] for one in record["figures"]["requirements"]):
        raise typer.Exit(2)


@dataclass(frozen=True, kw_only=True)
class Asking:
    """The rows and how they are evaluated, the same for both models."""

    tasks: Sequence[Task]
    limit: int | None
    judge: Judge | None
    config: AdaptConfig

    def interface_of(self, task: Task) -> str:
        """The name of a task's interface."""
        return self.config.interface or task.interface


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One model's answers to one task, by id; where answers are free text, with two kinds of scores.

    `scores` are of the given responses, `old` of the answers that the model before gave.
    """

    predictions: dict[str, Prediction]
    scores: dict[str, Score]
    old: dict[str, Score]


def _named(tasks: Sequence[Task]) -> list[Task]:
    """The tasks under the names the page shows: a file's without its folder, where that tells them apart."""
    given = [task.name for task in tasks]
    short = [Path(name).name if Path(name).suffix in ENDINGS else name for name in given]
    names = short if len(set(short)) == len(short) else given
    if len(set(names)) < len(names):
        raise ValueError(f"expected each --data once, got {max(names, key=names.count)} more than once")
    return [replace(task, name=name) for task, name in zip(tasks, names, strict=True)]


def _compare(before: str, after: str, asking: Asking, requirements: tuple[Requirement, ...]) -> Receipt:
    import torch

    was_id, was = _ask(before, asking)  # one model at a time in memory
    now_id, now = _ask(after, asking, was)
    made = [_row_set(task, asking, *pair) for task, *pair in zip(asking.tasks, was, now, strict=True)]
    device = str(models.choose_device(asking.config.device))
    used = ("judge", "interface", "max_new_tokens", "plain", "too_long", "compute_dtype")
    return Receipt(
        title=f"{after} compared with {before}",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        before=was_id,
        after=now_id,
        sets=tuple(own for own, _ in made),
        settings={
            **{name: getattr(asking.config, name) for name in used},
            "limit": asking.limit,
            "data": {task.name: task.fingerprint for task in asking.tasks},
        },
        environment=environment(threads=torch.get_num_threads(), device=device),
        requirements=requirements,
        notes=(
            *(["Both models have the same weights."] if was_id.fingerprint == now_id.fingerprint else []),
            *(note for _, notes in made for note in notes),
        ),
    )


def _ask(name: str, asking: Asking, before: Sequence[Answered] | None = None) -> tuple[ModelId, list[Answered]]:
    """Load a model and evaluate it on every task; `before` holds the answers of the model before, if this is not it."""
    from cplus.evaluation.task import score_answers
    from cplus.models.scoring import fitting, log_likelihoods, predict

    console.print(f"loading {clean(name)}")
    config = asking.config
    loaded = models.load(name, device=config.device)
    answers = []
    for place, task in enumerate(asking.tasks):
        bound = interfaces.build(
            asking.interface_of(task), loaded.tokenizer, wording=task.wording, chat=not config.plain
        )
        fit = fitting(bound, task.examples[: asking.limit], loaded.window, config.too_long)
        spoken = [row for row in fit if not bound.candidates(row)]
        what = f"{name}: {task.name}"
        with models.computing(config.compute_dtype, loaded.device):
            said = predict(
                loaded.model, bound, fit, judge=asking.judge, max_new_tokens=config.max_new_tokens, what=what
            )
            scores = log_likelihoods(loaded.model, [bound.encode(row) for row in spoken], what=f"{what}: responses")
            predictions = {prediction.id: prediction for prediction in said}
            known = predictions if before is None else before[place].predictions
            both = [row for row in spoken if row.id in known]
            texts = [str(known[row.id].answer) for row in both]
            old = score_answers(loaded.model, bound, both, texts, what=f"{what}: answers before")
        answers.append(
            Answered(
                predictions=predictions,
                scores={row.id: score for row, score in zip(spoken, scores, strict=True)},
                old={row.id: score for row, score in zip(both, old, strict=True) if score is not None},
            )
        )
    return ModelId(name=name, fingerprint=loaded.fingerprint), answers


def _row_set(task: Task, asking: Asking, was: Answered, now: Answered) -> tuple[RowSet, list[str]]:
    """The rows that fit both models' windows, and notes on them."""
    asked: Sequence[Example] = task.examples[: asking.limit]
    kept = [row for row in asked if row.id in was.predictions and row.id in now.predictions]
    if not kept:
        raise ValueError(f"{task.name}: none of {len(asked)} rows fits both models' windows")
    made = rows(
        kept,
        [was.predictions[row.id] for row in kept],
        [now.predictions[row.id] for row in kept],
        interface=asking.interface_of(task),
        losses=[loss for row in kept if (loss := _losses(was.scores, now.scores, row.id)) is not None],
        answers=[_losses(was.old, now.old, row.id) for row in kept],
    )
    own = RowSet(
        name=task.name,
        kind="task",
        interface=asking.interface_of(task),
        rows=made,
        judge=None if asking.judge is None else asking.config.judge,
    )
    notes = []
    if left := len(asked) - len(kept):
        notes.append(f"{left:,} of {len(asked):,} rows of {task.name} are longer than a window and were excluded.")
    if any(now.scores[id].num_tokens != was.scores[id].num_tokens for id in was.scores.keys() & now.scores.keys()):
        notes.append(
            f"The models split the responses of {task.name} into different tokens: their losses do not compare."
        )
    return own, notes


def _losses(was: Mapping[str, Score], now: Mapping[str, Score], id: str) -> Losses | None:
    if id not in was or id not in now:
        return None
    # A likelihood of 1 may round to a loss below 0.
    return Losses(before=max(0.0, -was[id].mean), after=max(0.0, -now[id].mean), tokens=was[id].num_tokens)


def _check(requirements: Sequence[Requirement], asking: Asking) -> None:
    """Refuse what these rows cannot measure before any model is loaded; at best every answer is right."""
    for one in requirements:
        parts = []
        for task in asking.tasks:
            count = len(task.examples[: asking.limit])
            free = asking.interface_of(task) == "freeform"
            best = count if one.metric == "retention" else 0
            right = None if free and asking.judge is None else best
            parts.append(Measured(kind="task", rows=count, right=right, scored=count if free else 0))
        if (reason := possible(one, parts)) is not None:
            raise ValueError(reason)


def _show(record: dict[str, Any], page: Path, *, json: bool) -> None:
    found = record["figures"]
    said = [*lead(found), *sentences(found), *record["notes"]]
    if json:
        print_json({"page": str(page), "sha256": record["sha256"], "verdict": said, "figures": found})
        return
    for text in (*said, *(sentence(one) for one in found["requirements"]), str(page)):
        output.print(clean(text).replace("\u00a0", " "), soft_wrap=True)
