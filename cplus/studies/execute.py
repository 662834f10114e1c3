"""One run of a study, from its spec to its file; what runs share is cached in the process and on disk."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from cplus import leader, world
from cplus.experiment.settings import RunSpec, SequenceSpec
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

RunOutcome: TypeAlias = Literal["done", "already done", "running elsewhere"]


PLACED = "CPLUS_PLACED_ON"
"""The devices that a study gave to this process; the result names them."""


def execute(spec: Spec, folder: Path, *, wait: float = 0.0) -> RunOutcome:
    """Do one run under a lock and write its result, unless it exists or another process is doing the run.

    Processes that share a run call it together; the first one has the lock and writes.
    """
    with ExitStack() as held:
        if (known := world.shared(lambda: _known(spec, folder, wait, held))) is not None:
            return known
        found = _result(spec)
        if world.first():
            store.save(found, folder)
        return "done"


def _known(spec: Spec, folder: Path, wait: float, held: ExitStack) -> RunOutcome | None:
    """Why a run is not done now; None if it is, and its lock is then held."""
    path = store.path_of(spec, folder)
    try:
        held.enter_context(holding(beside(path), wait=wait))
    except Held:
        return "running elsewhere"
    if store.load(spec, folder) is not None:
        return "already done"
    tidy(folder, path.name)
    return None


def _result(spec: Spec) -> Result:
    started = time.perf_counter()
    found = _run(spec) if isinstance(spec, RunSpec) else _sequence(spec)
    wall = round(time.perf_counter() - started, 2)
    placed = {"placed_on": os.environ[PLACED]} if PLACED in os.environ else {}
    return replace(found, environment={**found.environment, "wall_seconds": wall, **placed})


def _run(spec: RunSpec) -> Result:
    from cplus.experiment import run

    base = world.in_turn(lambda: CACHE.base(spec.model))
    given = leader.in_turn(lambda: CACHE.comparison(spec), (base.model, base.tokenizer))
    return run.run(spec, given)


def _sequence(spec: SequenceSpec) -> Result:
    from cplus.experiment import sequence

    if world.size() > 1:
        raise ValueError(f"a sequence of tasks runs in one process, got {world.size()}; use a larger device")
    return sequence.run_sequence(spec, CACHE.base(spec.model), CACHE.banks, first=CACHE.first(spec))


class ProcessCache:
    """The last model with its splits, comparison and first checkpoint; banks and splits are also cached on disk."""

    def __init__(self) -> None:
        self._base: Loaded | None = None
        self._splits: dict[tuple[SplitTask, str, str, str, int | None], TaskSplit] = {}
        self._external: dict[tuple[str, int, int | None, str, str], Group] = {}
        self._comparison: tuple[Spec, Comparison] | None = None
        self._first: tuple[Spec, sequence.Stage] | None = None

    @property
    def banks(self) -> Path:
        """The folder of banks."""
        from cplus.files import cache_folder

        return cache_folder() / "banks"

    def base(self, model: str) -> Loaded:
        """The base model; only the last one is kept."""
        from cplus import models

        if self._base is None or self._base.name != model:
            self._base, self._splits, self._external = models.load(model), {}, {}
            self._comparison = self._first = None
        return self._base

    def split(self, divide: SplitTask, spec: RunSpec, task: str) -> TaskSplit:
        """A task split by what the base model answers correctly."""
        from cplus.files import cache_folder

        base, key = self.base(spec.model), (divide, task, spec.interface, spec.compute_dtype, spec.num_rows)
        if key not in self._splits:
            folder = cache_folder() / "splits"
            self._splits[key] = divide(base, task, spec.interface, folder, spec.compute_dtype, spec.num_rows)
        return self._splits[key]

    def comparison(self, spec: RunSpec) -> Comparison:
        """What the methods of a run's comparison share; the last one is reused for runs that differ only by method."""
        from cplus.experiment.comparison import set_up
        from cplus.experiment.task_split import split_kept_task, split_task

        base, shared = self.base(spec.model), without_method(spec)
        if self._comparison is None or self._comparison[0] != shared:
            learned = self.split(split_task, spec, spec.task)
            other = spec.anchor_task
            kept = self.split(split_kept_task, spec, other) if other else None
            name = f"{spec.model}-{spec.task}-{spec.seed}".replace("/", "-")
            with holding(self.banks / f".{name}.lock", wait=3600.0):
                self._comparison = (
                    shared,
                    set_up(spec, base, learned, self.banks, kept=kept, external=self.external_task),
                )
        return self._comparison[1]

    def external_task(self, base: Loaded, name: str, spec: RunSpec) -> Group:
        """An external task with the base model's answers, evaluated once per seed."""
        from cplus.experiment.comparison import external_task

        key = name, spec.seed, spec.external_limit, spec.interface, spec.compute_dtype
        if key not in self._external:
            self._external[key] = external_task(base, name, spec)
        return self._external[key]

    def first(self, spec: SequenceSpec) -> sequence.Stage:
        """The checkpoint after the first task, which all methods of a sequence share."""
        from cplus.experiment import sequence

        base, shared = self.base(spec.model), without_method(spec)
        if self._first is None or self._first[0] != shared:
            self._first = shared, sequence.first_stage(spec, base)
        return self._first[1]


def without_method(spec: Spec) -> Spec:
    """The spec with its method and training settings reset, so that runs of one comparison give equal ones.

    Such runs share model, split, anchors, new rows, bank and external tasks, and are done one after another.
    """
    if isinstance(spec, SequenceSpec):
        return replace(spec, method="sft", num_anchors=0, num_probes=0)
    return replace(
        spec,
        method="",
        anchor_weight=0.5,
        beta=0.9,
        optimizer="",
        lr=0.0,
        lora=0,
        weight_decay=0.0,
        epochs=1,
        batch_size=1,
        order="file",
        evaluate_every=0,
        parts=1,
        refresh=None,
        memory=0.0,
        warmup=0.0,
        stop_at=None,
        strength=None,
        beyond=0,
        stop_loss=None,
        diagnose=(),
    )


CACHE = ProcessCache()
