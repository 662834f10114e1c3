"""New rows from several files, each with a weight: how often an epoch trains on its rows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cplus.data.examples import Choice, Example, FreeForm
from cplus.data.tasks import Task
from cplus.experiment.rows import Rows, Source


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The rows of all files as one task, how often an epoch uses each, and the file it comes from, both by id."""

    task: Task
    files: tuple[tuple[str, float, Task], ...]
    times: Mapping[str, int]
    origin: Mapping[str, int]

    def applied(self, rows: Rows) -> Rows:
        """The job's rows with the copies that an epoch trains on, and each file's share."""
        new = rows.new.examples
        most = max(self.times[example.id] for example in new)
        copies = tuple(example for k in range(1, most) for example in new if self.times[example.id] > k)
        sources = tuple(
            Source(
                name=name,
                weight=weight,
                rows=len(task.examples),
                trained=sum(self.origin[example.id] == number for example in new),
                per_epoch=sum(self.times[example.id] for example in new if self.origin[example.id] == number),
            )
            for number, (name, weight, task) in enumerate(self.files)
        )
        return replace(rows, copies=copies, sources=sources)


def mix(files: Sequence[tuple[str, float, Task]], seed: int) -> Mixture:
    """Every row as often as its file's weight: whole parts repeat it, a fraction draws rows once, by the seed.

    One file of weight 1 is returned as it is.
    """
    names = [name for name, _, _ in files]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"new: {twice[0]} is given twice; give it once with a weight, as in {twice[0]}=2")
    (first, _, task), *others = files
    for name, _, other in others:
        if _kind(other) != _kind(task):
            raise ValueError(
                f"new: expected files with rows of one kind, but {first} has {_kind(task)} and {name} has "
                f"{_kind(other)}; learn them in two jobs"
            )
    examples: list[Example] = []
    times: dict[str, int] = {}
    origin: dict[str, int] = {}
    for number, (name, weight, own) in enumerate(files):
        count = len(own.examples)
        drawn = set(random.Random(f"{seed}/new/{number}").sample(range(count), round(weight % 1 * count)))
        used = [(example, int(weight) + (i in drawn)) for i, example in enumerate(own.examples)]
        if not any(often for _, often in used):
            raise ValueError(f"new: a weight of {weight:g} leaves none of the {count} rows of {name}; raise it")
        for example, often in used:
            if often:
                row = replace(example, id=f"{name}: {example.id}") if example.id in times else example
                examples.append(row)
                times[row.id], origin[row.id] = often, number
    if len(files) > 1 or len(examples) < len(task.examples):
        task = replace(task, name=" + ".join(names), source=" + ".join(names), examples=tuple(examples), detected=None)
    return Mixture(task=task, files=tuple(files), times=times, origin=origin)


def _kind(task: Task) -> str:
    """What decides the interface of a task's rows, in words."""
    row = task.examples[0]
    if isinstance(row, Choice):
        return f"multiple choice ({task.interface}, {task.wording} wording)"
    assert isinstance(row, FreeForm)
    return "plain text" if row.is_text else "free text"
