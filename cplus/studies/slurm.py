"""Runs on a cluster: one array job of groups of runs that share a setting, put back into the queue when interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cplus.studies.execute import setting_of
from cplus.studies.runner import Ended, here
from cplus.studies.study import Spec

RUNS_A_JOB = 16
MAX_NUM_TIMEOUT = "slurm_max_num_timeout"


class Group:
    """Some runs as one job; what is finished when the job is interrupted is not repeated."""

    def __init__(self, specs: Sequence[Spec], folder: Path) -> None:
        self.specs, self.folder = list(specs), folder

    def __call__(self) -> list[Ended]:
        """Do the runs one after the other."""
        return list(here(self.specs, self.folder))

    def __submitit_checkpoint__(self) -> Any:
        """Asked by submitit before a job is stopped: submit the same group again."""
        return _submitit().helpers.DelayedSubmission(self)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """submitit's executor of this name (`slurm`, `local`) with its parameters."""

    logs: Path
    cluster: str = "slurm"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, specs: Sequence[Spec], folder: Path) -> Iterator[Ended]:
        """Submit every group, then hear of each run as its job ends."""
        submitit = _submitit()
        # How often a job may reach its time limit is asked of the executor, everything else of the submission.
        limits = {key: value for key, value in self.parameters.items() if key == MAX_NUM_TIMEOUT}
        rest = {key: value for key, value in self.parameters.items() if key not in limits}
        executor = submitit.AutoExecutor(folder=str(self.logs / "%j"), cluster=self.cluster, **limits)
        try:
            executor.update_parameters(name="cplus-study", **rest)
        except NameError as error:
            raise ValueError(f"submitit does not take these parameters: {error}") from error
        groups = grouped(specs)
        with executor.batch():
            jobs = [executor.submit(Group(group, folder.absolute())) for group in groups]
        for job, group in zip(jobs, groups, strict=True):
            failure = job.exception()  # waits for the job
            if failure is None:
                yield from job.result()
            else:
                yield from (Ended(spec=spec, failed=f"job {job.job_id}: {failure}") for spec in group)


def grouped(specs: Sequence[Spec]) -> list[list[Spec]]:
    """Runs of one setting together, at most a few a job."""
    groups: dict[Spec, list[Spec]] = {}
    for spec in specs:
        groups.setdefault(setting_of(spec), []).append(spec)
    return [own[i : i + RUNS_A_JOB] for own in groups.values() for i in range(0, len(own), RUNS_A_JOB)]


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise ImportError("the slurm executor needs submitit: pip install 'cplus[slurm]'") from error
    return submitit
