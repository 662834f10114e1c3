"""The runner: missing results are the queue; processes take runs from it, and a failed one stops no other."""

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
from cplus.studies.execute import Outcome, execute, setting_of
from cplus.studies.study import Spec

FAILURES = (ValueError, TypeError, OSError, ArithmeticError, RuntimeError, ImportError)
FOREVER = 7 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that ended: its outcome, or the sentence of what went wrong."""

    spec: Spec
    outcome: Outcome | None = None
    failed: str | None = None


Executor: TypeAlias = Callable[[Sequence[Spec], Path], Iterator[Ended]]


def queue(specs: Sequence[Spec], folder: Path) -> list[Spec]:
    """The runs without a result, those of one setting one after the other."""
    missing = [spec for spec in dict.fromkeys(specs) if store.load(spec, folder) is None]
    order = {shape: place for place, shape in enumerate(dict.fromkeys(map(setting_of, missing)))}
    models = {model: place for place, model in enumerate(dict.fromkeys(spec.model for spec in missing))}
    return sorted(missing, key=lambda spec: (models[spec.model], order[setting_of(spec)]))


def perform(specs: Sequence[Spec], folder: Path, executor: Executor) -> Iterator[Ended]:
    """Do what is missing; runs that another runner was doing are waited for at the end."""
    others = []
    for ended in executor(queue(specs, folder), folder):
        if ended.outcome == "elsewhere":
            others.append(ended.spec)
        else:
            yield ended
    for spec in others:
        yield _ended(spec, folder, wait=FOREVER)


def here(specs: Sequence[Spec], folder: Path) -> Iterator[Ended]:
    """One run after the other in this process."""
    for spec in specs:
        yield _ended(spec, folder)


def _ended(spec: Spec, folder: Path, *, wait: float = 0.0) -> Ended:
    try:
        return Ended(spec=spec, outcome=execute(spec, folder, wait=wait))
    except FAILURES as error:
        return Ended(spec=spec, failed=f"{type(error).__name__}: {error}")


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Runs spread over processes of their own, `threads` threads each."""

    workers: int
    threads: int = 1

    def __call__(self, specs: Sequence[Spec], folder: Path) -> Iterator[Ended]:
        """Hand out runs; a worker keeps to its setting as long as there are runs of it."""
        waiting = list(specs)
        slots = [self._slot() for _ in range(min(self.workers, len(waiting)))]
        last: dict[int, Spec] = {}
        running: dict[Future[Outcome], tuple[int, Spec]] = {}
        try:
            while waiting or running:
                for slot in set(range(len(slots))) - {slot for slot, _ in running.values()}:
                    if waiting:
                        taken = {setting_of(spec) for _, spec in running.values()}
                        spec = waiting.pop(_next(waiting, last.get(slot), taken))
                        running[slots[slot].submit(execute, spec, folder)] = slot, spec
                        last[slot] = spec
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    slot, spec = running.pop(future)
                    error = future.exception()
                    if error is None:
                        yield Ended(spec=spec, outcome=future.result())
                        continue
                    if not isinstance(error, FAILURES):
                        raise error
                    yield Ended(spec=spec, failed=f"{type(error).__name__}: {error}")
                    _stop(slots[slot])  # a process that was killed takes no more runs
                    slots[slot] = self._slot()
        finally:
            for slot_ in slots:
                _stop(slot_)

    def _slot(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(self.threads,))


def _next(waiting: Sequence[Spec], last: Spec | None, taken: set[Spec]) -> int:
    """The first run of the worker's setting, else of a setting nobody has, else the first."""
    own = None if last is None else setting_of(last)
    free = 0
    for place, spec in enumerate(waiting):
        shape = setting_of(spec)
        if shape == own:
            return place
        if not free and shape not in taken:
            free = place
    return free


def _begin(threads: int) -> None:
    """A worker leaves Ctrl-C to its parent, which stops it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)


def _stop(slot: ProcessPoolExecutor) -> None:
    """End a worker now: results are written whole or not at all, and its locks end with it."""
    processes = list((slot._processes or {}).values())
    slot.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
