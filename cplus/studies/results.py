"""Where results lie: one JSON file a run, named by its spec; whoever reads them needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cplus.experiment.record import (
    RunResult,
    RunSpec,
    load_result,
    load_sequence,
    result_name,
    save_result,
    save_sequence,
    sequence_name,
)
from cplus.studies.study import Result, Spec


def path_of(spec: Spec, folder: Path) -> Path:
    """The file of a run's result."""
    return folder / (result_name(spec) if isinstance(spec, RunSpec) else sequence_name(spec))


def save(result: Result, folder: Path) -> Path:
    """Write a result under its spec's name."""
    return save_result(result, folder) if isinstance(result, RunResult) else save_sequence(result, folder)


def load(spec: Spec, folder: Path) -> Result | None:
    """The result of this spec; None if it is not there. A damaged or foreign file is an error that names it."""
    path = path_of(spec, folder)
    if not path.exists():
        return None
    try:
        found: Result = load_result(path) if isinstance(spec, RunSpec) else load_sequence(path)
    except ValueError as error:
        raise ValueError(f"{error}; move it away to have the run repeated. No other result was touched") from error
    if found.spec != spec:
        raise ValueError(
            f"{path}: expected the result of {spec}, but it holds that of {found.spec}; the folder is of another "
            "version of the studies: choose another --out, or move the file away"
        )
    return found


def finished(specs: Iterable[Spec], folder: Path) -> list[Result]:
    """The results of these specs that are there, in their order."""
    return [found for spec in specs if (found := load(spec, folder)) is not None]
