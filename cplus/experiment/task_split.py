"""What the base model knows of a task: its rows as an interface asks them, parted into past and new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from cplus import interfaces, models
from cplus.data.examples import Choice, Example, FreeForm, Message
from cplus.data.predictions import Prediction
from cplus.data.split import Split, cached_split, split, stack
from cplus.data.tasks import load_task
from cplus.interfaces import Interface
from cplus.probes.own_answers import own_answers
from cplus.scoring import predict, repeated

Parted = tuple[Interface, Split]
Part = Callable[[models.Loaded, str, str, Path | None], Parted]


def part(base: models.Loaded, task: str, interface: str, splits: Path | None = None) -> Parted:
    """Run the base model once over a task and part it into past and new; `splits` is a folder that remembers it."""
    bound, examples = _asked(base, task, interface)
    return bound, _split(base, bound, examples, splits)


def part_kept(base: models.Loaded, task: str, interface: str, splits: Path | None = None) -> Parted:
    """Part a task that is kept and not learned: of free text the past are the base model's own answers.

    Where a text's tokens are not those that the model wrote, one pass may not repeat it; such rows are left out.
    """
    if interface != "freeform":
        return part(base, task, interface, splits)
    bound, examples = _asked(base, task, interface)
    found = _split(base, bound, own_answers(base, bound, examples, name=task), splits)
    repeats = tuple(prediction for prediction in found.predictions if prediction.right)
    return bound, replace(found, new=(), predictions=repeats)


def _asked(base: models.Loaded, task: str, interface: str) -> tuple[Interface, tuple[Example, ...]]:
    """How a task is asked, and its rows: in free text a multiple-choice row is a question with a terse answer."""
    found = load_task(task)
    bound = interfaces.build(interface, base.tokenizer, wording=found.wording)
    if interface == "freeform":
        return bound, tuple(terse(example) for example in found.examples)
    if not all(isinstance(example, Choice) for example in found.examples):
        raise ValueError(f"{task} is free text; expected the interface freeform for it, got {interface}")
    return bound, found.examples


def terse(example: Example) -> FreeForm:
    """A multiple-choice row as a request whose whole response is the right choice; free text stays as it is.

    >>> terse(Choice(id="q1", question="Is ice cold?", choices=("yes", "no"), answer=0)).response
    'yes'
    """
    if isinstance(example, FreeForm):
        return example
    asked = (Message(role="user", content=example.question),)
    return FreeForm(id=example.id, messages=asked, response=example.right)


def _split(base: models.Loaded, bound: Interface, examples: tuple[Example, ...], splits: Path | None) -> Split:
    where = stack(device=str(base.device))

    def answered() -> list[Prediction]:
        return answers(base.model, bound, examples)

    known = {"model_fingerprint": base.fingerprint, "interface": bound.name}
    if splits is not None:
        return cached_split(splits, examples, answered, stack=where, **known)
    return split(examples, answered(), stack=where, **known)


def answers(model: nn.Module, interface: Interface, examples: Sequence[Example]) -> list[Prediction]:
    """What a run counts as the model's answers: its choices, or in free text whether it repeats the responses."""
    return (repeated if interface.name == "freeform" else predict)(model, interface, examples)
