"""What the base model knows of a task: its rows split into past (answered correctly) and new (answered incorrectly)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cplus import interfaces, models
from cplus.data.examples import Choice, Example, FreeForm, Message
from cplus.data.predictions import Prediction
from cplus.data.split import Split, cached_split, split, stack
from cplus.data.tasks import load_task
from cplus.experiment.measure import answered
from cplus.experiment.rows import Group
from cplus.interfaces import Interface
from cplus.probes.own_answers import own_answers

TaskSplit = tuple[Interface, Split]
SplitTask = Callable[[models.Loaded, str, str, Path | None, str, int | None], TaskSplit]


def split_task(
    base: models.Loaded,
    task: str,
    interface: str,
    cache: Path | None = None,
    compute_dtype: str = "float32",
    num_rows: int | None = None,
) -> TaskSplit:
    """Run the base model once over a task's first rows and split them into past and new ones.

    `cache` is a folder of splits.
    """
    bound, examples = _rows(base, task, interface, num_rows)
    return bound, _split(base, bound, examples, cache, compute_dtype)


def split_kept_task(
    base: models.Loaded,
    task: str,
    interface: str,
    cache: Path | None = None,
    compute_dtype: str = "float32",
    num_rows: int | None = None,
) -> TaskSplit:
    """Split a task that is kept and not learned: for free text the past rows hold the base model's own answers.

    Where a text's tokens are not those that the model wrote, one pass may not repeat it; such rows are left out.
    """
    if interface != "freeform":
        return split_task(base, task, interface, cache, compute_dtype, num_rows)
    bound, examples = _rows(base, task, interface, num_rows)
    found = _split(base, bound, own_answers(base, bound, examples, name=task), cache, compute_dtype)
    repeats = tuple(prediction for prediction in found.predictions if prediction.right)
    return bound, replace(found, new=(), predictions=repeats)


def _rows(
    base: models.Loaded, task: str, interface: str, num_rows: int | None
) -> tuple[Interface, tuple[Example, ...]]:
    """A task's interface and rows: in free text a multiple-choice row is a question with a terse answer."""
    found = load_task(task)
    examples = found.examples[:num_rows]
    bound = interfaces.build(interface, base.tokenizer, wording=found.wording)
    if interface == "freeform":
        return bound, tuple(terse(example) for example in examples)
    if not all(isinstance(example, Choice) for example in examples):
        raise ValueError(f"{task} is free text; expected the interface freeform for it, got {interface}")
    return bound, examples


def terse(example: Example) -> FreeForm:
    """A multiple-choice row as a request whose whole response is the right choice; free text stays as it is.

    >>> terse(Choice(id="q1", question="Is ice cold?", choices=("yes", "no"), answer=0)).response
    'yes'
    """
    if isinstance(example, FreeForm):
        return example
    request = (Message(role="user", content=example.question),)
    return FreeForm(id=example.id, messages=request, response=example.right)


def _split(
    base: models.Loaded, bound: Interface, examples: tuple[Example, ...], cache: Path | None, compute_dtype: str
) -> Split:
    where = stack(device=str(base.device), compute_dtype=compute_dtype)
    whole = Group(name="task", part="external", interface=bound, examples=examples)
    known = {"model_fingerprint": base.fingerprint, "interface": bound.name}

    def answers() -> list[Prediction]:
        with models.computing(compute_dtype, base.device):
            return answered(base.model, whole)

    if cache is not None:
        return cached_split(cache, examples, answers, stack=where, **known)
    return split(examples, answers(), stack=where, **known)
