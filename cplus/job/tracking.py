"""The curves in a tracker: TensorBoard, Weights & Biases or Trackio, each by its own package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from cplus import world
from cplus.files import fingerprint

PROJECT = "cplus"


class Tracker(Protocol):
    """Receives values by the update they belong to."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add values."""
        ...

    def finish(self) -> None:
        """End the run."""
        ...


class Nothing:
    """No tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Discard the values."""

    def finish(self) -> None:
        """Nothing to do."""


class TensorBoard:
    """Event files in the job's folder."""

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        _package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(out / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One scalar per name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()


class Hosted:
    """Weights & Biases, and Trackio, which has the same interface; a resumed job continues its run."""

    def __init__(self, package: str, options: Mapping[str, Any]) -> None:
        self._run = _package(package).init(**options)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """All values of one update."""
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        """End the run."""
        self._run.finish()


def _wandb(out: Path, settings: Mapping[str, Any]) -> Tracker:
    key = fingerprint([str(out.resolve()), dict(settings)])[:16]
    options = {"project": PROJECT, "name": out.name, "id": key, "resume": "allow", "config": dict(settings), "dir": out}
    return Hosted("wandb", options)


def _trackio(out: Path, settings: Mapping[str, Any]) -> Tracker:
    name = f"{out.name}-{fingerprint([str(out.resolve()), dict(settings)])[:8]}"
    return Hosted("trackio", {"project": PROJECT, "name": name, "resume": "allow", "config": dict(settings)})


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": _wandb,
    "trackio": _trackio,
}


def tracker(name: str | None, out: Path, settings: Mapping[str, Any]) -> Tracker:
    """The tracker of that name, or none; the first process of a job logs for all."""
    return Nothing() if name is None or not world.first() else TRACKERS[name](out, settings)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"reporting to {name} needs its package: pip install {name}") from error
