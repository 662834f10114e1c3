"""The runner: missing results form the queue, processes take runs from it, and a failed run stops no other."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cplus.studies import results as store
from cplus.studies.execute import RunOutcome, execute, without_method
from cplus.studies.study import Spec

FAILURES = (ValueError, TypeError, OSError, ArithmeticError, RuntimeError, ImportError)
FOREVER = 7 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """A run that ended: its outcome, or the error message."""

    spec: Spec
    outcome: RunOutcome | None = None
    failed: str | None = None


Executor: TypeAlias = Callable[[Sequence[Spec], Path], Iterator[EndedRun]]


def queue(specs: Sequence[Spec], folder: Path) -> list[Spec]:
    """The runs without a result, those of one setting one after another."""
    missing = [spec for spec in dict.fromkeys(specs) if store.load(spec, folder) is None]
    order = {shared: index for index, shared in enumerate(dict.fromkeys(map(without_method, missing)))}
    models = {model: index for index, model in enumerate(dict.fromkeys(spec.model for spec in missing))}
    return sorted(missing, key=lambda spec: (models[spec.model], order[without_method(spec)]))


def perform(specs: Sequence[Spec], folder: Path, executor: Executor) -> Iterator[EndedRun]:
    """Do the missing runs, then wait for those that another runner is doing."""
    others = []
    for ended in executor(queue(specs, folder), folder):
        if ended.outcome == "running elsewhere":
            others.append(ended.spec)
        else:
            yield ended
    for spec in others:
        yield _ended(spec, folder, wait=FOREVER)


def in_this_process(specs: Sequence[Spec], folder: Path) -> Iterator[EndedRun]:
    """Do the runs one after another in this process."""
    for spec in specs:
        yield _ended(spec, folder)


def _ended(spec: Spec, folder: Path, *, wait: float = 0.0) -> EndedRun:
    try:
        return EndedRun(spec=spec, outcome=execute(spec, folder, wait=wait))
    except FAILURES as error:
        return EndedRun(spec=spec, failed=f"{type(error).__name__}: {error}")


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Runs distributed over worker processes of `threads` threads each."""

    workers: int
    threads: int = 1

    def __call__(self, specs: Sequence[Spec], folder: Path) -> Iterator[EndedRun]:
        """Distribute runs; a worker gets runs of its last setting as long as there are any."""
        waiting = list(specs)
        slots = [self._slot() for _ in range(min(self.workers, len(waiting)))]
        last: dict[int, Spec] = {}
        running: dict[Future[RunOutcome], tuple[int, Spec]] = {}
        try:
            while waiting or running:
                for slot in set(range(len(slots))) - {slot for slot, _ in running.values()}:
                    if waiting:
                        taken = {without_method(spec) for _, spec in running.values()}
                        spec = waiting.pop(_next(waiting, last.get(slot), taken))
                        running[slots[slot].submit(execute, spec, folder)] = slot, spec
                        last[slot] = spec
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    slot, spec = running.pop(future)
                    error = future.exception()
                    if error is None:
                        yield EndedRun(spec=spec, outcome=future.result())
                        continue
                    if not isinstance(error, FAILURES):
                        raise error
                    yield EndedRun(spec=spec, failed=f"{type(error).__name__}: {error}")
                    _stop(slots[slot])  # a killed process accepts no more runs
                    slots[slot] = self._slot()
        finally:
            for slot_ in slots:
                _stop(slot_)

    def _slot(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(self.threads,))


def _next(waiting: Sequence[Spec], last: Spec | None, taken: set[Spec]) -> int:
    """The index of the first run of the worker's last setting, else of a setting no worker has, else 0."""
    own = None if last is None else without_method(last)
    free = 0
    for index, spec in enumerate(waiting):
        shared = without_method(spec)
        if shared == own:
            return index
        if not free and shared not in taken:
            free = index
    return free


def _begin(threads: int) -> None:
    """Set up a worker; it ignores Ctrl-C, since its parent stops it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)


def _stop(slot: ProcessPoolExecutor) -> None:
    """Terminate a worker; results are written atomically, and its locks are released."""
    processes = list((slot._processes or {}).values())
    slot.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
