"""One run of a study, from its spec to its file; what runs share is kept in the process and on the disk."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from cplus.experiment.record import RunSpec, SequenceSpec
from cplus.files import tidy
from cplus.locks import Held, beside, holding
from cplus.studies import results as store
from cplus.studies.study import Result, Spec

if TYPE_CHECKING:
    from cplus.experiment import sequence
    from cplus.experiment.comparison import Comparison
    from cplus.experiment.rows import Group
    from cplus.experiment.task_split import SplitTask, TaskSplit
    from cplus.models import Loaded

Outcome: TypeAlias = Literal["done", "there", "elsewhere"]


def execute(spec: Spec, folder: Path, *, wait: float = 0.0) -> Outcome:
    """Do one run and write its result: nobody else does it meanwhile, and nobody does it twice."""
    path = store.path_of(spec, folder)
    try:
        with holding(beside(path), wait=wait):
            if store.load(spec, folder) is not None:
                return "there"
            tidy(folder, path.name)
            store.save(_result(spec), folder)
            return "done"
    except Held:
        return "elsewhere"


def _result(spec: Spec) -> Result:
    started = time.perf_counter()
    found = _run(spec) if isinstance(spec, RunSpec) else _sequence(spec)
    wall = round(time.perf_counter() - started, 2)
    return replace(found, environment={**found.environment, "wall_seconds": wall})


def _run(spec: RunSpec) -> Result:
    from cplus.experiment import run

    return run.run(spec, SHARED.setting(spec))


def _sequence(spec: SequenceSpec) -> Result:
    from cplus.experiment import sequence

    return sequence.run_sequence(spec, SHARED.base(spec.model), SHARED.banks, first=SHARED.first(spec))


class Shared:
    """The last model, splits, setting and first checkpoint of this process; banks and splits also on the disk."""

    def __init__(self) -> None:
        self._base: Loaded | None = None
        self._parted: dict[tuple[SplitTask, str, str], TaskSplit] = {}
        self._outside: dict[tuple[str, int, int | None, str], Group] = {}
        self._setting: tuple[Spec, Comparison] | None = None
        self._first: tuple[SequenceSpec, sequence.Stage] | None = None

    @property
    def banks(self) -> Path:
        """The folder of banks."""
        from cplus.files import cache_folder

        return cache_folder() / "banks"

    def base(self, model: str) -> Loaded:
        """The base model; one at a time is kept."""
        from cplus import models

        if self._base is None or self._base.name != model:
            self._base, self._parted, self._outside = models.load(model), {}, {}
            self._setting = self._first = None
        return self._base

    def parted(self, splits: SplitTask, model: str, task: str, interface: str) -> TaskSplit:
        """What the base model knows of a task, parted in this way."""
        from cplus.files import cache_folder

        base, key = self.base(model), (splits, task, interface)
        if key not in self._parted:
            self._parted[key] = splits(base, task, interface, cache_folder() / "splits")
        return self._parted[key]

    def setting(self, spec: RunSpec) -> Comparison:
        """The setting of a run; the last one where nothing differs that decides it."""
        from cplus.experiment.comparison import set_up
        from cplus.experiment.task_split import split_kept_task, split_task

        base, shape = self.base(spec.model), setting_of(spec)
        if self._setting is None or self._setting[0] != shape:
            parted = self.parted(split_task, spec.model, spec.task, spec.interface)
            other = spec.anchor_task
            kept = self.parted(split_kept_task, spec.model, other, spec.interface) if other else None
            place = f"{spec.model}-{spec.task}-{spec.seed}".replace("/", "-")
            with holding(self.banks / f".{place}.lock", wait=3600.0):
                self._setting = shape, set_up(spec, base, parted, self.banks, kept=kept, external=self.external)
        return self._setting[1]

    def external(self, base: Loaded, name: str, spec: RunSpec) -> Group:
        """An outside task with the base model's answers, asked once a seed."""
        from cplus.experiment.comparison import external_task

        key = name, spec.seed, spec.external_limit, spec.interface
        if key not in self._outside:
            self._outside[key] = external_task(base, name, spec)
        return self._outside[key]

    def first(self, spec: SequenceSpec) -> sequence.Stage:
        """The checkpoint of the first task, which all methods of a sequence share."""
        from cplus.experiment import sequence

        shape = replace(spec, method="sft", num_anchors=0, num_probes=0)
        base = self.base(spec.model)
        if self._first is None or self._first[0] != shape:
            self._first = shape, sequence.first_stage(spec, base)
        return self._first[1]


def setting_of(spec: Spec) -> Spec:
    """The spec without what leaves model, split, anchors, new rows, bank and outside tasks alone.

    Runs with equal ones follow each other in one process.
    """
    if isinstance(spec, SequenceSpec):
        return replace(spec, method="sft", num_anchors=0, num_probes=0)
    # Put back to what any spec may say: the setting is the same whatever these are.
    return replace(
        spec,
        method="",
        anchor_weight=0.5,
        beta=0.9,
        optimizer="",
        lr=0.0,
        weight_decay=0.0,
        epochs=1,
        batch_size=1,
        order="file",
        evaluate_every=0,
        parts=1,
        refresh=None,
        memory=0.0,
        warmup=0.0,
        diagnose=(),
    )


SHARED = Shared()
