"""The runner: missing results form the queue, processes or a cluster take runs from it, and each run is one record."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cplus.base.files import cache_folder, canonical_json, replacing, tidy
from cplus.base.locks import Held, beside, holding
from cplus.distributed import processes
from cplus.lab import SCALES, STUDIES, runs_of
from cplus.lab.estimate import Device, teams
from cplus.lab.records import Result, Spec, parse_result, record_name, record_of
from cplus.lab.summaries import T, grouped
from cplus.training.settings import RunSpec, SequenceSpec, StudySettings

if TYPE_CHECKING:
    from cplus.lab import sequence
    from cplus.lab.runs import Comparison, TaskSplit
    from cplus.models import Loaded
    from cplus.training.rows import Group

FOREVER = 7 * 24 * 3600.0


# The results on disk: a line of its study's JSONL each.


OTHER = "other"
"""Where runs go that no study of the scale declares."""


def save(result: Result, folder: Path) -> None:
    """Add a result to the file of the first study that declares it; a kill leaves the whole line or nothing."""
    path = folder / f"{_first_studies(folder.resolve().name).get(result.spec, OTHER)}.jsonl"
    with holding(beside(path), wait=FOREVER):
        tidy(folder, path.name)
        before = path.read_bytes().rstrip(b"\n").split(b"\n") if path.exists() else []
        with replacing(path) as part:
            part.write_bytes(b"".join(line + b"\n" for line in (*before, canonical_json(record_of(result)).encode())))


@lru_cache
def _first_studies(scale: str) -> dict[Spec, str]:
    found: dict[Spec, str] = {}
    for name, study in STUDIES.items() if scale in SCALES else ():
        found = dict.fromkeys(runs_of(study, SCALES[scale]), name) | found
    return found


def stored(folder: Path) -> tuple[dict[Spec, Result], list[str]]:
    """The results of a folder, and an error for each damaged line. Earlier versions wrote a file for each result."""
    found: dict[Spec, Result] = {}
    refused: list[str] = []
    for path in sorted((*folder.glob("*.jsonl"), *folder.glob("*.json"), *folder.glob("runs/*.json"))):
        status = path.stat()
        results, errors = _read_lines(path, (status.st_ino, status.st_mtime_ns, status.st_size))
        found = {result.spec: result for result in results} | found
        refused += errors
    return found, refused


@lru_cache(maxsize=64)
def _read_lines(path: Path, version: tuple[int, int, int]) -> tuple[list[Result], list[str]]:
    results, refused = [], []
    whole = path.read_bytes()
    for number, line in enumerate(whole.split(b"\n") if path.suffix == ".jsonl" else [whole], 1):
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
    """The existing results of these specs, in their order; a damaged line may hold one of the others: an error."""
    specs = list(specs)
    found, refused = stored(folder)
    if refused and any(spec not in found for spec in specs):
        raise ValueError(f"{refused[0]}; remove this line to repeat its run. No other result was changed")
    return [found[spec] for spec in specs if spec in found]


# One run of a study, from its spec to its record; what runs share is cached in the process and on disk.


RunOutcome: TypeAlias = Literal["done", "already done", "running elsewhere"]


PLACED = "CPLUS_PLACED_ON"
"""The devices that a study gave to this process; the result names them."""


def execute(spec: Spec, folder: Path, *, wait: float = 0.0) -> RunOutcome:
    """Do one run under a lock and save its result, unless it exists or another process is doing the run.

    Processes that share a run call it together; the first one has the lock and writes.
    """
    from cplus.lab import runs, sequence

    def known() -> RunOutcome | None:
        """Why the run is not done now; None if it is, and its lock is then held."""
        try:
            held.enter_context(holding(beside(folder / record_name(spec)), wait=wait))
        except Held:
            return "running elsewhere"
        return "already done" if finished([spec], folder) else None

    with ExitStack() as held:
        if (outcome := processes.shared(known)) is not None:
            return outcome
        started = time.perf_counter()
        if isinstance(spec, RunSpec):
            given = processes.in_turn(lambda: CACHE.comparison(spec))
            found: Result = runs.run(spec, given)
        elif processes.size() > 1:
            raise ValueError(f"a sequence of tasks runs in one process, got {processes.size()}; use a larger device")
        else:
            base = CACHE.base(spec.model)
            found = sequence.run_sequence(spec, base, cache_folder() / "banks", first=CACHE.first(spec))
        took = {"wall_seconds": round(time.perf_counter() - started, 2)}
        placed = {"placed_on": os.environ[PLACED]} if PLACED in os.environ else {}
        if processes.first():
            save(replace(found, environment={**found.environment, **took, **placed}), folder)
        return "done"


class ProcessCache:
    """The last model and what was computed from it; banks and splits are on disk too.

    Of comparisons and first checkpoints only the last is kept: runs that share one are done one after another.
    """

    def __init__(self) -> None:
        self._base: Loaded | None = None
        self._found: dict[str, dict[Any, Any]] = {}

    def base(self, model: str) -> Loaded:
        """The base model; only the last one is kept."""
        from cplus import models

        if self._base is None or self._base.name != model:
            self._base, self._found = models.load(model), {}
        return self._base

    def _once(self, kind: str, key: Any, make: Callable[[], T]) -> T:
        own = self._found.setdefault(kind, {})
        if key not in own:
            if kind in ("comparison", "first"):
                own.clear()
            own[key] = make()
        found: T = own[key]
        return found

    def comparison(self, spec: RunSpec) -> Comparison:
        """What the methods of a run's comparison share."""
        from cplus.lab import runs

        base, folder = self.base(spec.model), cache_folder()

        def split(task: str, *, kept: bool) -> TaskSplit:
            given = task, spec.interface, folder / "splits", spec.compute_dtype, spec.num_rows
            return self._once("split", (kept, *given), lambda: runs.split_task(base, *given, kept=kept))

        def external(base: Loaded, name: str, spec: RunSpec) -> Group:
            key = name, spec.seed, spec.external_limit, spec.interface, spec.compute_dtype
            return self._once("external", key, lambda: runs.external_task(base, name, spec))

        def make() -> Comparison:
            learned = split(spec.task, kept=False)
            kept = split(spec.anchor_task, kept=True) if spec.anchor_task else None
            name = f"{spec.model}-{spec.task}-{spec.seed}".replace("/", "-")
            with holding(folder / "banks" / f".{name}.lock", wait=3600.0):
                return runs.set_up(spec, base, learned, folder / "banks", kept=kept, external=external)

        return self._once("comparison", without_method(spec), make)

    def first(self, spec: SequenceSpec) -> sequence.Stage:
        """The checkpoint after the first task, which all methods of a sequence share."""
        from cplus.lab import sequence

        base = self.base(spec.model)
        return self._once("first", without_method(spec), lambda: sequence.first_stage(spec, base))


OF_TRAINING = {*StudySettings.model_fields, "evaluate_every", "warmup", "stop_at", "beyond", "stop_loss", "diagnose"}
OF_TRAINING -= {"seed", "num_probes", "shots", "temperature", "topics", "compute_dtype"}
"""The settings that differ between the runs of one comparison."""


def without_method(spec: Spec) -> Any:
    """What runs of one comparison have in common, which are done one after another: model, rows, bank, external tasks.

    Methods of a sequence share its first task; anchors and probes come after it.
    """
    if isinstance(spec, SequenceSpec):
        return replace(spec, method="sft", num_anchors=0, num_probes=0)
    return tuple(getattr(spec, each.name) for each in fields(spec) if each.name not in OF_TRAINING)


CACHE = ProcessCache()


# The runner: missing results form the queue, processes take runs from it, and a failed run stops no other.


FAILURES = (ValueError, TypeError, OSError, ArithmeticError, RuntimeError, ImportError)


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """A run that ended: its outcome, or the error message."""

    spec: Spec
    outcome: RunOutcome | None = None
    failed: str | None = None


Executor: TypeAlias = Callable[[Sequence[Spec], Path], Iterator[EndedRun]]


def queue(specs: Sequence[Spec], folder: Path) -> list[Spec]:
    """The runs without a result, those of one setting one after another."""
    done = {result.spec for result in finished(specs, folder)}
    missing = [spec for spec in dict.fromkeys(specs) if spec not in done]
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
    yield from in_this_process(others, folder, wait=FOREVER)


def in_this_process(specs: Sequence[Spec], folder: Path, *, wait: float = 0.0) -> Iterator[EndedRun]:
    """Do the runs one after another in this process."""
    for spec in specs:
        try:
            yield EndedRun(spec=spec, outcome=execute(spec, folder, wait=wait))
        except FAILURES as error:
            yield EndedRun(spec=spec, failed=f"{type(error).__name__}: {error}")


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Runs distributed over workers of one thread each; where there are devices, each worker has its own of them."""

    workers: int
    devices: tuple[Device, ...] = ()

    def __call__(self, specs: Sequence[Spec], folder: Path) -> Iterator[EndedRun]:
        """Distribute runs, those that take one device first."""
        for own, places in teams(self.devices, self.workers, specs):
            yield from self._distributed(own, folder, places)

    def _distributed(
        self, specs: Sequence[Spec], folder: Path, places: Sequence[Sequence[Device]]
    ) -> Iterator[EndedRun]:
        """A worker gets runs of its last setting as long as there are any; all its processes do each run together."""
        waiting = list(specs)
        slots = [start_worker(place) for place in places]
        last: dict[int, Spec] = {}
        running: dict[Future[RunOutcome], tuple[int, Spec]] = {}
        try:
            while waiting or running:
                for slot in set(range(len(slots))) - {slot for slot, _ in running.values()}:
                    if waiting:
                        taken = {without_method(spec) for _, spec in running.values()}
                        # A run of the worker's last setting, else of a setting that no worker has, else the first.
                        own = without_method(last[slot]) if slot in last else None
                        shared = list(map(without_method, waiting))
                        order = [(key != own, key in taken, index) for index, key in enumerate(shared)]
                        last[slot] = waiting.pop(min(order)[2])
                        running |= {
                            pool.submit(execute, last[slot], folder): (slot, last[slot]) for pool in slots[slot]
                        }
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    if future not in running:
                        continue  # of a worker that was stopped
                    slot, spec = running.pop(future)
                    error = future.exception()
                    if error is not None and not isinstance(error, FAILURES):
                        raise error
                    if error is not None:
                        stop(slots[slot])  # a killed process accepts no more runs, and others would wait for it
                        slots[slot] = start_worker(places[slot])
                        running = {each: own for each, own in running.items() if own[0] != slot}
                        yield EndedRun(spec=spec, failed=f"{type(error).__name__}: {error}")
                    elif slot not in {slot for slot, _ in running.values()}:
                        yield EndedRun(spec=spec, outcome=future.result())
        finally:
            for worker in slots:
                stop(worker)


def start_worker(place: Sequence[Device]) -> list[ProcessPoolExecutor]:
    """One process per device of the place, or one on the processors."""
    context, size = multiprocessing.get_context("spawn"), max(1, len(place))
    visible, port = ",".join(device.name for device in place), 0
    if size > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
    return [
        ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(visible, rank, size, port))
        for rank in range(size)
    ]


def stop(worker: Sequence[ProcessPoolExecutor]) -> None:
    """Terminate a worker's processes; results are written atomically, and locks are released."""
    for pool in worker:
        running = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()


_JOINED = ExitStack()
"""Keeps a worker's processes together until they end."""


def _begin(visible: str, rank: int, size: int, port: int) -> None:
    """Set up a process of a worker; it ignores Ctrl-C, since its parent stops it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    if visible:  # before CUDA starts in this process
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        os.environ[PLACED] = visible
    import torch

    torch.set_num_threads(1)
    if size > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in numbers.items()}})
        _JOINED.enter_context(processes.joined())


# Runs on a cluster: one array job of groups of runs that share a setting; interrupted groups are requeued.


RUNS_PER_JOB = 16
MAX_NUM_TIMEOUT = "slurm_max_num_timeout"


class RunGroup:
    """Some runs as one job of one or more processes; runs finished before an interruption are not repeated."""

    def __init__(self, specs: Sequence[Spec], folder: Path, processes: int = 1) -> None:
        self.specs, self.folder, self.processes = list(specs), folder, processes

    def __call__(self) -> list[EndedRun]:
        """Do the runs one after another; the tasks of one job do each run together."""
        if self.processes > 1:
            _submitit().helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        with processes.joined():
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
        """Submit all groups as one array, then yield the runs of each job as it ends; its tasks share each run."""
        # The number of timeouts is an argument of the executor; all other parameters are of the submission.
        limits = {key: value for key, value in self.parameters.items() if key == MAX_NUM_TIMEOUT}
        executor = _submitit().AutoExecutor(folder=str(self.logs / "%j"), cluster=self.cluster, **limits)
        rest = {key: value for key, value in self.parameters.items() if key not in limits}
        try:
            executor.update_parameters(name="cplus-study", **rest)
        except NameError as error:
            raise ValueError(f"submitit does not accept these parameters: {error}") from error
        tasks = int(rest.get("tasks_per_node", 1))
        groups = [
            own[i : i + RUNS_PER_JOB]
            for own in grouped(specs, without_method).values()
            for i in range(0, len(own), RUNS_PER_JOB)
        ]
        with executor.batch():
            jobs = [executor.submit(RunGroup(group, folder.absolute(), tasks)) for group in groups]
        for job, group in zip(jobs, groups, strict=True):
            failure = job.exception()  # waits for the job
            if failure is None:
                yield from job.results()[0]  # every task has the same
            else:
                yield from (EndedRun(spec=spec, failed=f"job {job.job_id}: {failure}") for spec in group)


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise ImportError("the slurm executor needs submitit: pip install 'cplus[slurm]'") from error
    return submitit
