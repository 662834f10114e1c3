"""The runner: missing results form the queue, processes take runs from it, and a failed run stops no other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cplus import world
from cplus.studies import results as store
from cplus.studies.execute import PLACED, RunOutcome, execute, without_method
from cplus.studies.placement import Device, teams
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
    """Runs distributed over workers of `threads` threads; where there are devices, each worker has its own of them."""

    workers: int
    threads: int = 1
    devices: tuple[Device, ...] = ()

    def __call__(self, specs: Sequence[Spec], folder: Path) -> Iterator[EndedRun]:
        """Distribute runs, those that take one device first."""
        for own, places in teams(self.devices, self.workers, specs):
            yield from self._distributed(own, folder, places)

    def _distributed(
        self, specs: Sequence[Spec], folder: Path, places: Sequence[tuple[Device, ...]]
    ) -> Iterator[EndedRun]:
        """A worker gets runs of its last setting as long as there are any."""
        waiting = list(specs)
        slots = [Worker(place, self.threads) for place in places]
        last: dict[int, Spec] = {}
        running: dict[Future[RunOutcome], tuple[int, Spec]] = {}
        try:
            while waiting or running:
                for slot in set(range(len(slots))) - {slot for slot, _ in running.values()}:
                    if waiting:
                        taken = {without_method(spec) for _, spec in running.values()}
                        spec = waiting.pop(_next(waiting, last.get(slot), taken))
                        running[slots[slot].submit(spec, folder)] = slot, spec
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
                    slots[slot].stop()  # a killed process accepts no more runs
                    slots[slot] = Worker(places[slot], self.threads)
        finally:
            for worker in slots:
                worker.stop()


class Worker:
    """One process per device of its place, or one on the processors; several do each run together."""

    def __init__(self, place: Sequence[Device], threads: int) -> None:
        context, size = multiprocessing.get_context("spawn"), max(1, len(place))
        visible, port = ",".join(device.name for device in place), _free_port() if size > 1 else 0
        self._pools = [
            ProcessPoolExecutor(
                1, mp_context=context, initializer=_begin, initargs=(threads, visible, rank, size, port)
            )
            for rank in range(size)
        ]

    def submit(self, spec: Spec, folder: Path) -> Future[RunOutcome]:
        """The run's outcome, once every process has ended it or one has failed."""
        parts = [pool.submit(execute, spec, folder) for pool in self._pools]
        if len(parts) == 1:
            return parts[0]
        whole: Future[RunOutcome] = Future()
        lock = threading.Lock()

        def ended(part: Future[RunOutcome]) -> None:
            with lock:
                if whole.done() or part.cancelled():
                    return
                if (error := part.exception()) is not None:
                    whole.set_exception(error)
                elif all(each.done() for each in parts):
                    whole.set_result(parts[0].result())

        for part in parts:
            part.add_done_callback(ended)
        return whole

    def stop(self) -> None:
        """Terminate its processes; results are written atomically, and locks are released."""
        for pool in self._pools:
            processes = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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


_JOINED = ExitStack()
"""Keeps a worker's processes together until they end."""


def _begin(threads: int, visible: str, rank: int, size: int, port: int) -> None:
    """Set up a process of a worker; it ignores Ctrl-C, since its parent stops it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if visible:  # before CUDA starts in this process
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        os.environ[PLACED] = visible
    import torch

    torch.set_num_threads(threads)
    if size > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in numbers.items()}})
        _JOINED.enter_context(world.joined())
