"""Runs on a cluster: one array job of groups of runs that share a setting; interrupted groups are requeued."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cplus import world
from cplus.studies.execute import without_method
from cplus.studies.placement import Device, by_width
from cplus.studies.runner import EndedRun, in_this_process
from cplus.studies.study import Spec

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
