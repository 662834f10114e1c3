"""The runner: missing results form the queue, processes or a cluster take runs from it, and each run is one record."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cplus.base.files import cache_folder, canonical_json, read_json, replacing, tidy
from cplus.base.locks import Held, beside, holding
from cplus.distributed import processes as leader
from cplus.distributed import processes as world
from cplus.lab import SCALES, STUDIES, runs_of
from cplus.lab.estimate import Device, by_width, teams
from cplus.lab.records import Result, Spec, load_result, parse_result, record_name, save_result
from cplus.training.settings import RunSpec, SequenceSpec

if TYPE_CHECKING:
    from cplus.lab import sequence
    from cplus.lab.runs import Comparison, TaskSplit
    from cplus.models import Loaded
    from cplus.training.rows import Group


# The results on disk: a line of its study's JSONL each, and a file of its own until the runner has moved it there.


RUNS = "runs"
"""The folder of single files; in results of earlier versions they are in the scale's folder itself."""
OTHER = "other"
"""Where runs go that no study of the scale declares."""


def path_of(spec: Spec, folder: Path) -> Path:
    """The file that a run writes its result to."""
    return folder / RUNS / record_name(spec)


def save(result: Result, folder: Path) -> Path:
    """Write a result to its own file."""
    return save_result(result, folder / RUNS)


def load(spec: Spec, folder: Path) -> Result | None:
    """The result of this spec; None if there is none. A damaged or foreign record is an error that names it."""
    # A result is moved by writing its line first: what has no file any more has a line.
    if (found := load_file(spec, folder)) is not None:
        return found
    lines, refused = stored(folder)
    if spec not in lines and refused:  # it may be the one that cannot be read
        raise ValueError(f"{refused[0]}; remove this line to repeat its run. No other result was changed")
    return lines.get(spec)


def load_file(spec: Spec, folder: Path) -> Result | None:
    """The result in a run's own file; None if it has no such file."""
    for path in (path_of(spec, folder), folder / record_name(spec)):
        try:
            found = load_result(path)
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise ValueError(f"{error}; move it away to repeat the run. No other result was changed") from error
        if found.spec != spec:
            raise ValueError(
                f"{path}: expected the result of {spec}, found that of {found.spec}; another version of the "
                "studies wrote it: choose another --out, or move the file away"
            )
        return found
    return None


def stored(folder: Path) -> tuple[dict[Spec, Result], list[str]]:
    """The results in a folder's JSONL files, and an error for each damaged line."""
    found: dict[Spec, Result] = {}
    refused: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        status = path.stat()
        results, errors = _read_lines(path, (status.st_ino, status.st_mtime_ns, status.st_size))
        found = {result.spec: result for result in results} | found
        refused += errors
    return found, refused


@lru_cache(maxsize=64)
def _read_lines(path: Path, version: tuple[int, int, int]) -> tuple[list[Result], list[str]]:
    results, refused = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            results.append(parse_result(json.loads(line), where))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            refused.append(f"{where}: expected a JSON object, but it does not parse: {error}")
        except ValueError as error:
            refused.append(str(error))
    return results, refused


def finished(specs: Iterable[Spec], folder: Path) -> list[Result]:
    """The existing results of these specs, in their order."""
    return [found for spec in specs if (found := load(spec, folder)) is not None]


def files_in(folder: Path) -> list[Path]:
    """The results' own files."""
    return sorted((*folder.glob("*.json"), *folder.glob(f"{RUNS}/*.json")))


def fold(folder: Path) -> None:
    """Move finished results from their own files to the JSONL of the first study that declares them.

    The lines are written before the files are removed; after a crash in between a result has both, and gets no second
    line. A damaged file stays where it is.
    """
    if not files_in(folder):
        return
    with holding(folder / ".fold.lock", wait=FOREVER):
        tidy(folder)
        there, _ = stored(folder)
        studies = _first_studies(folder)
        moved, lines = [], dict[str, list[str]]()
        for path in files_in(folder):
            try:
                found = load_result(path)
            except ValueError:
                continue
            if record_name(found.spec) == path.name:
                moved.append(path)
                if found.spec not in there:
                    there[found.spec] = found
                    lines.setdefault(studies.get(found.spec, OTHER), []).append(canonical_json(read_json(path)))
        for name, new in lines.items():
            path = folder / f"{name}.jsonl"
            old = path.read_bytes().rstrip(b"\n").split(b"\n") if path.exists() else []
            with replacing(path) as part:
                part.write_bytes(b"".join(line + b"\n" for line in (*old, *(line.encode() for line in new))))
        for path in moved:
            path.unlink()


def _first_studies(folder: Path) -> dict[Spec, str]:
    """The first study that declares each run of the scale that the folder is named after."""
    scale = SCALES.get(folder.resolve().name)
    found: dict[Spec, str] = {}
    if scale is not None:
        for name, study in STUDIES.items():
            found = dict.fromkeys(runs_of(study, scale), name) | found
    return found


# One run of a study, from its spec to its file; what runs share is cached in the process and on disk.


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
            save(found, folder)
        return "done"


def _known(spec: Spec, folder: Path, wait: float, held: ExitStack) -> RunOutcome | None:
    """Why a run is not done now; None if it is, and its lock is then held."""
    path = path_of(spec, folder)
    try:
        held.enter_context(holding(beside(path), wait=wait))
    except Held:
        return "running elsewhere"
    if load(spec, folder) is not None:
        return "already done"
    tidy(path.parent, path.name)
    return None


def _result(spec: Spec) -> Result:
    started = time.perf_counter()
    found = _run(spec) if isinstance(spec, RunSpec) else _sequence(spec)
    wall = round(time.perf_counter() - started, 2)
    placed = {"placed_on": os.environ[PLACED]} if PLACED in os.environ else {}
    return replace(found, environment={**found.environment, "wall_seconds": wall, **placed})


def _run(spec: RunSpec) -> Result:
    from cplus.lab import runs

    base = world.in_turn(lambda: CACHE.base(spec.model))
    given = leader.led_in_turn(lambda: CACHE.comparison(spec), (base.model, base.tokenizer))
    return runs.run(spec, given)


def _sequence(spec: SequenceSpec) -> Result:
    from cplus.lab import sequence

    if world.size() > 1:
        raise ValueError(f"a sequence of tasks runs in one process, got {world.size()}; use a larger device")
    return sequence.run_sequence(spec, CACHE.base(spec.model), CACHE.banks, first=CACHE.first(spec))


class ProcessCache:
    """The last model with its splits, external tasks, comparison and first checkpoint; banks and splits are on disk."""

    def __init__(self) -> None:
        self._base: Loaded | None = None
        self._splits: dict[tuple[Any, ...], TaskSplit] = {}
        self._external: dict[tuple[Any, ...], Group] = {}
        self._comparison: tuple[Spec, Comparison] | None = None
        self._first: tuple[Spec, sequence.Stage] | None = None

    @property
    def banks(self) -> Path:
        """The folder of banks."""
        return cache_folder() / "banks"

    def base(self, model: str) -> Loaded:
        """The base model; only the last one is kept."""
        from cplus import models

        if self._base is None or self._base.name != model:
            self._base, self._splits, self._external = models.load(model), {}, {}
            self._comparison = self._first = None
        return self._base

    def split(self, spec: RunSpec, task: str, *, kept: bool) -> TaskSplit:
        """A task split by what the base model answers correctly."""
        from cplus.lab.runs import split_task

        base, key = self.base(spec.model), (kept, task, spec.interface, spec.compute_dtype, spec.num_rows)
        if key not in self._splits:
            folder = cache_folder() / "splits"
            found = split_task(base, task, spec.interface, folder, spec.compute_dtype, spec.num_rows, kept=kept)
            self._splits[key] = found
        return self._splits[key]

    def external_task(self, base: Loaded, name: str, spec: RunSpec) -> Group:
        """An external task with the base model's answers, evaluated once per seed."""
        from cplus.lab.runs import external_task

        key = name, spec.seed, spec.external_limit, spec.interface, spec.compute_dtype
        if key not in self._external:
            self._external[key] = external_task(base, name, spec)
        return self._external[key]

    def comparison(self, spec: RunSpec) -> Comparison:
        """What the methods of a run's comparison share; the last one is reused for runs that differ only by method."""
        from cplus.lab.runs import set_up

        base, shared = self.base(spec.model), without_method(spec)
        if self._comparison is None or self._comparison[0] != shared:
            learned = self.split(spec, spec.task, kept=False)
            kept = self.split(spec, spec.anchor_task, kept=True) if spec.anchor_task else None
            name = f"{spec.model}-{spec.task}-{spec.seed}".replace("/", "-")
            with holding(self.banks / f".{name}.lock", wait=3600.0):
                made = set_up(spec, base, learned, self.banks, kept=kept, external=self.external_task)
            self._comparison = shared, made
        return self._comparison[1]

    def first(self, spec: SequenceSpec) -> sequence.Stage:
        """The checkpoint after the first task, which all methods of a sequence share."""
        from cplus.lab import sequence

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


# The runner: missing results form the queue, processes take runs from it, and a failed run stops no other.


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
    missing = [spec for spec in dict.fromkeys(specs) if load(spec, folder) is None]
    order = {shared: index for index, shared in enumerate(dict.fromkeys(map(without_method, missing)))}
    models = {model: index for index, model in enumerate(dict.fromkeys(spec.model for spec in missing))}
    return sorted(missing, key=lambda spec: (models[spec.model], order[without_method(spec)]))


def perform(specs: Sequence[Spec], folder: Path, executor: Executor) -> Iterator[EndedRun]:
    """Do the missing runs, wait for those that another runner is doing, then `fold` all results."""
    others = []
    for ended in executor(queue(specs, folder), folder):
        if ended.outcome == "running elsewhere":
            others.append(ended.spec)
        else:
            yield ended
    for spec in others:
        yield _ended(spec, folder, wait=FOREVER)
    fold(folder)


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


# Runs on a cluster: one array job of groups of runs that share a setting; interrupted groups are requeued.


RUNS_PER_JOB = 16
MAX_NUM_TIMEOUT = "slurm_max_num_timeout"


DEVICE_GB = "device_memory_gb"
"""Our own parameter: the gigabytes of each device of the cluster; runs that need more take several."""
MOST_DEVICES = 64


class RunGroup:
    """Some runs as one job of one or more processes; runs finished before an interruption are not repeated."""

    def __init__(self, specs: Sequence[Spec], folder: Path, processes: int = 1) -> None:
        self.specs, self.folder, self.processes = list(specs), folder, processes

    def __call__(self) -> list[EndedRun]:
        """Do the runs one after another; the tasks of one job do each run together."""
        if self.processes > 1:
            _submitit().helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        with world.joined():
            return list(in_this_process(self.specs, self.folder))

    def __submitit_checkpoint__(self) -> Any:
        """Called by submitit before a job is stopped: submit the same group again."""
        return _submitit().helpers.DelayedSubmission(self)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """submitit's executor of this name (`slurm`, `local`) with its parameters."""

    logs: Path
    cluster: str = "slurm"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, specs: Sequence[Spec], folder: Path) -> Iterator[EndedRun]:
        """Submit all groups, one array for each number of devices, then yield the runs of each job as it ends."""
        memory = self.parameters.get(DEVICE_GB)
        found = [] if memory is None else [Device(name="", memory=float(memory) * 1e9)] * MOST_DEVICES
        submitted = []
        for processes, own in sorted(by_width(specs, found).items()):
            executor, groups = self._executor(processes), grouped(own)
            with executor.batch():
                jobs = [executor.submit(RunGroup(group, folder.absolute(), processes)) for group in groups]
            submitted += list(zip(jobs, groups, strict=True))
        for job, group in submitted:
            failure = job.exception()  # waits for the job
            if failure is None:
                yield from job.results()[0]  # every task has the same
            else:
                yield from (EndedRun(spec=spec, failed=f"job {job.job_id}: {failure}") for spec in group)

    def _executor(self, processes: int) -> Any:
        # The number of timeouts is an argument of the executor; all other parameters are of the submission.
        limits = {key: value for key, value in self.parameters.items() if key == MAX_NUM_TIMEOUT}
        rest = {key: value for key, value in self.parameters.items() if key not in (*limits, DEVICE_GB)}
        if processes > 1:
            rest |= {"tasks_per_node": processes, "gpus_per_node": processes}
        executor = _submitit().AutoExecutor(folder=str(self.logs / "%j"), cluster=self.cluster, **limits)
        try:
            executor.update_parameters(name="cplus-study", **rest)
        except NameError as error:
            raise ValueError(f"submitit does not accept these parameters: {error}") from error
        return executor


def grouped(specs: Sequence[Spec]) -> list[list[Spec]]:
    """Runs of one setting together, at most RUNS_PER_JOB per job."""
    groups: dict[Spec, list[Spec]] = {}
    for spec in specs:
        groups.setdefault(without_method(spec), []).append(spec)
    return [own[i : i + RUNS_PER_JOB] for own in groups.values() for i in range(0, len(own), RUNS_PER_JOB)]


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise ImportError("the slurm executor needs submitit: pip install 'cplus[slurm]'") from error
    return submitit
