"""The results on disk: one JSON file per run, named after its spec; reading needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cplus.experiment.record import (
    RunResult,
    load_result,
    load_sequence,
    result_name,
    save_result,
    save_sequence,
    sequence_name,
)
from cplus.experiment.settings import RunSpec
from cplus.studies.study import Result, Spec


def path_of(spec: Spec, folder: Path) -> Path:
    """The file of a run's result."""
    return folder / (result_name(spec) if isinstance(spec, RunSpec) else sequence_name(spec))


def save(result: Result, folder: Path) -> Path:
    """Write a result under its spec's name."""
    return save_result(result, folder) if isinstance(result, RunResult) else save_sequence(result, folder)


def load(spec: Spec, folder: Path) -> Result | None:
    """The result of this spec; None if there is no file. A damaged or foreign file is an error that names it."""
    path = path_of(spec, folder)
    if not path.exists():
        return None
    try:
        found: Result = load_result(path) if isinstance(spec, RunSpec) else load_sequence(path)
    except ValueError as error:
        raise ValueError(f"{error}; move it away to repeat the run. No other result was changed") from error
    if found.spec != spec:
        raise ValueError(
            f"{path}: expected the result of {spec}, found that of {found.spec}; another version of the "
            "studies wrote it: choose another --out, or move the file away"
        )
    return found


def finished(specs: Iterable[Spec], folder: Path) -> list[Result]:
    """The existing results of these specs, in their order."""
    return [found for spec in specs if (found := load(spec, folder)) is not None]
