"""Tasks learned one after another: each stage starts from the last stage's model and protects every earlier task."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cplus import models
from cplus.base.cost import Work, cost_row
from cplus.base.environment import environment
from cplus.data import interfaces
from cplus.data.examples import Example, Prediction
from cplus.data.tasks import draw_anchors, load_task, split
from cplus.evaluation.changes import acquisition, flips, percent
from cplus.evaluation.statistics import survival
from cplus.lab.records import SequenceResult
from cplus.lab.runs import new_rows
from cplus.methods.repair import repair_row
from cplus.models.scoring import predict
from cplus.probes.build import cached_bank
from cplus.training import measure
from cplus.training.driver import begin
from cplus.training.rows import Group, PastTask
from cplus.training.settings import RunSpec, SequenceSpec

TaskAnswers = tuple[tuple[Prediction, ...], ...]
"""Every task's answers, in the order of the tasks."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The model after a stage, with its answers to every task and the stage's cost."""

    current: models.Loaded
    answers: TaskAnswers
    figures: dict[str, Any]
    training: Work
    preservation: Work
    seconds: float


def run_sequence(spec: SequenceSpec, base: models.Loaded, banks: Path, *, first: Stage | None = None) -> SequenceResult:
    """Learn the spec's tasks in order from a copy of the base model, evaluating all tasks after every stage.

    `first` is what `first_stage` returned for a spec that differs in the method alone; with it the first task
    is learned once for all methods.

    Paper: App. E.9 (E5).
    """
    tasks = bind_tasks(spec, base)
    before = answer_all(base, tasks, spec.compute_dtype)
    stages = [first or first_stage(spec, base)]
    kept: list[PastTask] = []
    for number in range(2, len(tasks) + 1):
        last = stages[-1]
        kept.append(past_task(spec.stage(number), last, tasks[number - 2], number - 2, banks))
        stages.append(run_stage(spec, number, last.current, last.answers, tasks, kept))
    evaluations = [before, *(stage.answers for stage in stages)]
    work = {kind: sum((getattr(stage, kind) for stage in stages), Work()) for kind in ("training", "preservation")}
    parameters = sum(p.numel() for p in base.model.parameters())
    histories = [
        [answers[index][row].right for answers in evaluations[index + 1 :]]
        for index, task in enumerate(tasks)
        for row in range(len(task.examples))
    ]
    return SequenceResult(
        spec=spec,
        accuracy=[[percent(own) for own in answers] for answers in evaluations],
        sizes={task.name: len(task.examples) for task in tasks},
        stages=[stage.figures for stage in stages],
        survival=survival(histories),
        counts={"parameters": parameters},
        cost=cost_row(parameters, **work),
        seconds=sum(stage.seconds for stage in stages),
        environment=environment(threads=torch.get_num_threads(), device=str(base.device)),
    )


def first_stage(spec: SequenceSpec, base: models.Loaded) -> Stage:
    """The checkpoint that all methods share: the first task, before which there is nothing to protect."""
    tasks = bind_tasks(spec, base)
    return run_stage(spec, 1, base, answer_all(base, tasks, spec.compute_dtype), tasks, [])


def bind_tasks(spec: SequenceSpec, base: models.Loaded) -> tuple[Group, ...]:
    """The tasks bound to the model's tokenizer, each cut to at most `num_rows` rows in their own order."""
    found = []
    for name in spec.tasks:
        task = load_task(name)
        rows = task.examples
        if spec.num_rows is not None and spec.num_rows < len(rows):
            chosen = sorted(random.Random(f"{spec.seed}/{name}").sample(range(len(rows)), spec.num_rows))
            rows = tuple(rows[i] for i in chosen)
        bound = interfaces.build(spec.interface, base.tokenizer, wording=task.wording)
        found.append(Group(name=name, part="external", interface=bound, examples=rows))
    return tuple(found)


def answer_all(current: models.Loaded, tasks: Sequence[Group], compute_dtype: str = "float32") -> TaskAnswers:
    """The model's answers, task by task."""
    with models.computing(compute_dtype, current.device):
        return tuple(tuple(predict(current.model, task.interface, task.examples, what=task.name)) for task in tasks)


def run_stage(
    spec: SequenceSpec,
    number: int,
    last: models.Loaded,
    before: TaskAnswers,
    tasks: Sequence[Group],
    kept: Sequence[PastTask],
) -> Stage:
    """One stage: a copy of the last model learns the rows of the task that this model answers incorrectly."""
    run, task = spec.stage(number), tasks[number - 1]
    new = new_rows(split(task.examples, before[number - 1]), run)
    copied = dataclasses.replace(last, model=copy.deepcopy(last.model))
    learned = dataclasses.replace(task, part="acquisition", examples=tuple(new))
    training = begin(run.settings, copied, learned, kept)
    for _ in training.run():
        pass
    model = training.finish()
    current = dataclasses.replace(
        last, name=f"{spec.model} after {task.name}", model=model, fingerprint=models.fingerprint(model)
    )
    answers = answer_all(current, tasks, spec.compute_dtype)
    return Stage(
        current=current,
        answers=answers,
        figures={**figures(number, task, new, before, answers), "repair": repair_row(training.repaired)},
        training=training.log.training,
        preservation=training.log.preservation,
        seconds=training.log.seconds,
    )


def past_task(run: RunSpec, last: Stage, task: Group, index: int, banks: Path) -> PastTask:
    """A task just learned: anchors drawn from the rows now correct, and probes written by the current model.

    Paper: App. E.9: a separate past-example set and self-probe bank for each preceding task.
    """
    found = split(task.examples, last.answers[index])
    anchors = draw_anchors(found, run.num_anchors, run.seed)
    past = PastTask(name=task.name, interface=task.interface, anchors=anchors, written_by=last.current.fingerprint)
    if not (anchors and run.num_probes and run.settings.row.needs_bank):
        return past
    bank = cached_bank(last.current, task.interface, anchors, run.settings.probes, banks=banks)
    return dataclasses.replace(past, probes=bank.examples)


def figures(
    number: int, task: Group, new: Sequence[Example], before: TaskAnswers, after: TaskAnswers
) -> dict[str, Any]:
    """What a stage learned and lost: of its new rows, of earlier tasks, of its own task's rows that were right."""
    tables = [flips(was, now) for was, now in zip(before, after, strict=True)]
    ids = {example.id for example in new}
    earlier = [flip for table in tables[: number - 1] for flip in table]
    return {
        "task": task.name,
        "new": len(new),
        "acquisition": acquisition([(id, kind) for id, kind in tables[number - 1] if id in ids]).percent,
        "retention": measure.kept(earlier),
        "own_retention": measure.kept(tables[number - 1]),
    }
