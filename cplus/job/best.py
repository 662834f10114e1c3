"""The weights of the best epoch so far, and of the last good one, kept beside the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cplus import files, world
from cplus.experiment.driver import Training
from cplus.job.checkpoint import read_state


def badness(point: Mapping[str, float]) -> float | None:
    """How bad an epoch's figures are: past loss plus new loss, or the shares lost and not learned; lower is better.

    Held-out new rows count before trained ones. None where an evaluation lacks past or new rows.

    >>> badness({"past_nll": 0.5, "new_nll": 2.0, "validation_nll": 2.5}), badness({"retention": 90.0})
    (3.0, None)
    >>> round(badness({"retention": 90.0, "acquisition": 100.0}), 3)
    0.1
    """
    past = point.get("past_nll", _lost(point.get("retention")))
    validation = point.get("validation_nll", _lost(point.get("validation")))
    new = point.get("new_nll", _lost(point.get("acquisition"))) if validation is None else validation
    return None if past is None or new is None else past + new


def _lost(percent: float | None) -> float | None:
    return None if percent is None else 1 - percent / 100


class Best:
    """Writes the weights of an epoch that is better than all before it, and restores them at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._badness = self._read()["badness"] if path.is_file() else float("inf")

    def offer(self, training: Training, point: Mapping[str, float]) -> None:
        """Keep the weights of this epoch if it is the best one."""
        found = badness(point)
        if found is not None and found < self._badness:
            body = {"epoch": int(point["epoch"]), "badness": found, "weights": training.weights()}
            if world.first():
                files.write_state(self._path, body)
            self._badness = found

    def restore(self, training: Training) -> int | None:
        """Load the best weights and return their epoch; None if no epoch was evaluated."""
        if not self._path.is_file():
            return None
        kept = self._read()
        training.restore(kept["weights"])
        return int(kept["epoch"])

    def _read(self) -> dict[str, Any]:
        return read_state(self._path, "remove it to write the best of the epochs from the checkpoint on")


class LastGood:
    """Writes the weights of every epoch at which past rows had not lost too much, each over the one before."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, training: Training, epoch: int) -> None:
        """Keep the weights of this epoch; 0 is the base model."""
        weights = training.weights()
        if world.first():
            files.write_state(self._path, {"epoch": epoch, "weights": weights})

    def restore(self, training: Training) -> int:
        """Load the last good weights and return their epoch."""
        kept = read_state(self._path, "the last good epoch is lost: start a new job")
        training.restore(kept["weights"])
        return int(kept["epoch"])
