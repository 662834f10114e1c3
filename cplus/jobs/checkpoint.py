"""Checkpoints: at every instant the old state or the new one, in one file or in one part per process."""

from __future__ import annotations

import math
import pickle
import shutil
import struct
import time
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cplus.base import files
from cplus.distributed import processes
from cplus.jobs.progress import say
from cplus.training import sharding
from cplus.training.driver import Training

CHECKPOINT = "cplus-checkpoint/2"
_DAMAGED = (
    RuntimeError, EOFError, OSError, ValueError, LookupError, struct.error, zlib.error, pickle.UnpicklingError,
    zipfile.BadZipFile,
)  # fmt: skip
"""What reading a damaged archive raises."""
_SHARDS = "shards-"
_ANEW = "remove it to train from the beginning"


class Checkpoints:
    """Writes the last state of a training and reads it again; another job's state is refused."""

    def __init__(self, path: Path, identity: str, *, minutes: float, steps: int | None) -> None:
        self._path, self._index, self._identity = path, path.with_suffix(".json"), identity
        self._minutes, self._steps = minutes, steps
        self._written = time.monotonic()
        self.step: int | None = None
        """The update after which the last checkpoint was written."""
        self.done = False
        """Whether the last checkpoint is that of a training at its end."""

    def load(self, training: Training) -> bool:
        """Restore the last state, if there is one."""
        kept = self._newest(training)
        if kept is None:
            return False
        if kept["numerics"] != _numerics():
            say(f"the job began with {kept['numerics']} and continues with {_numerics()}: the last bits may differ")
        had, found = len(kept["state"]["random_cuda"]), torch.cuda.device_count()
        if had != found:
            say(f"the job began with {had} GPUs and continues with {found}: what is drawn at random on them may differ")
        training.load_state_dict(kept["state"])
        self.step, self.done = training.log.cursor.step, training.log.done
        processes.agree("the checkpoint they resume from", self.step)
        return True

    def _newest(self, training: Training) -> dict[str, Any] | None:
        """The state as this process holds it, from one file or from shards; both exist only after a kill."""
        file = self._checked(read_state(self._path, _ANEW)) if self._path.is_file() else None
        shards = self._checked(files.read_sealed(self._index)) if self._index.is_file() else None
        if shards is not None and (file is None or shards["step"] > file["state"]["log"]["cursor"]["step"]):
            try:
                state = sharding.read(self._path.parent / shards["folder"], shards["files"], training.held())
            except _DAMAGED as error:
                raise _damaged(self._index, error, _ANEW) from error
            return {**shards, "state": state}
        return None if file is None else {**file, "state": training.own_part(file["state"])}

    def _checked(self, kept: Any) -> dict[str, Any]:
        """Refuse another version's or another job's checkpoint."""
        if not isinstance(kept, dict) or kept.get("format") != CHECKPOINT:
            raise ValueError(f"{self._path}: expected the format {CHECKPOINT}; it was written by another version")
        if kept["identity"] != self._identity:
            raise ValueError(
                f"{self._path}: the model, the rows or the bank changed since the job began; start a new job"
            )
        return kept

    def due(self, step: int) -> bool:
        """Whether the minutes or updates between checkpoints have passed."""
        by_time = time.monotonic() - self._written >= 60 * self._minutes
        return by_time or (self._steps is not None and step - (self.step or 0) >= self._steps)

    def save(self, training: Training) -> None:
        """Write the state; weights that are not finite are refused."""
        if not training.finite():
            raise FloatingPointError(
                f"a weight is not finite after step {training.log.cursor.step}. Lower the learning rate or clip the "
                "gradient"
            )
        training.tally()
        body = {"format": CHECKPOINT, "identity": self._identity, "numerics": _numerics()}
        if training.twin is not None:
            self._save_shards(training, body)
        elif processes.first():
            files.write_state(self._path, {**body, "state": training.state_dict()})
            self._index.unlink(missing_ok=True)
            self._tidy(None)
        self._written, self.step, self.done = time.monotonic(), training.log.cursor.step, training.log.done

    def _save_shards(self, training: Training, body: dict[str, Any]) -> None:
        """Every process writes its part into a new folder; then one small file is replaced that names it."""
        step = training.log.cursor.step
        name = processes.shared(lambda: f"{_SHARDS}{step}-{time.time_ns()}")
        hashes = sharding.write(self._path.parent / name, training.state_dict(), training.held())
        if processes.first():
            files.sync(self._path.parent / name)
            files.write_json(self._index, files.sealed({**body, "folder": name, "step": step, "files": hashes}))
            self._path.unlink(missing_ok=True)
            self._tidy(name)

    def _tidy(self, kept: str | None) -> None:
        """Remove the shards of earlier checkpoints, and those that a killed job had not completed."""
        for folder in self._path.parent.glob(f"{_SHARDS}*"):
            if folder.name != kept:
                shutil.rmtree(folder)


def read_state(path: Path, otherwise: str) -> dict[str, Any]:
    """Read what `files.write_state` wrote; a damaged file is refused, and `otherwise` says what to do then."""
    try:
        with zipfile.ZipFile(path) as archive:
            if (part := archive.testzip()) is not None:  # a mapped file would return a flipped bit unnoticed
                raise zipfile.BadZipFile(f"{part} does not match its checksum")
        # Mapped, not read: the states are copied into place one tensor at a time.
        kept: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _DAMAGED as error:
        raise _damaged(path, error, otherwise) from error
    return kept


def _damaged(path: Path, error: Exception, otherwise: str) -> ValueError:
    why = str(error).partition(".")[0]  # torch's further sentences explain how to run what a pickle holds
    return ValueError(f"{path}: expected a complete file, but it cannot be read ({why}); {otherwise}")


def _numerics() -> str:
    """The library version and thread count, which decide the last bits of a sum."""
    return f"torch {torch.__version__} on {torch.get_num_threads()} threads"


# The weights of the best epoch so far, and of the last good one, kept beside the checkpoint.


def badness(point: Mapping[str, float]) -> float | None:
    """How bad an epoch's figures are: the loss of new rows held out, else what past and new rows lack together.

    None where an evaluation lacks past or new rows.

    >>> badness({"past_nll": 0.5, "new_nll": 2.0, "validation_nll": 2.5}), badness({"retention": 90.0})
    (2.5, None)
    >>> round(badness({"retention": 90.0, "acquisition": 100.0}), 3)
    0.1
    """

    def bad(loss: str, percent: str) -> float | None:
        return point.get(loss, 1 - point[percent] / 100 if percent in point else None)

    past, held, new = bad("past_nll", "retention"), bad("validation_nll", "validation"), bad("new_nll", "acquisition")
    return held if held is not None else None if past is None or new is None else past + new


_LOST = {
    "best.pt": "remove it to write the best of the epochs from the checkpoint on",
    "good.pt": "the last good epoch is lost: start a new job",
}


class KeptWeights:
    """The weights of the best epoch, or of the last good one, beside the checkpoint; each over the one before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._badness = float(self._read().get("badness", math.inf)) if path.is_file() else math.inf

    def _read(self) -> dict[str, Any]:
        return read_state(self._path, _LOST[self._path.name])

    def offer(self, training: Training, point: Mapping[str, float]) -> None:
        """Keep the weights of this epoch if it is the best one."""
        found = badness(point)
        if found is not None and found < self._badness:
            self.keep(training, int(point["epoch"]), badness=found)
            self._badness = found

    def keep(self, training: Training, epoch: int, **more: float) -> None:
        """Keep the weights of this epoch; 0 is the base model."""
        weights = training.weights()
        if processes.first():
            files.write_state(self._path, {"epoch": epoch, **more, "weights": weights})

    def restore(self, training: Training) -> int | None:
        """Load the kept weights and return their epoch; None if there are none."""
        if not self._path.is_file():
            return None
        kept = self._read()
        training.restore(kept["weights"])
        return int(kept["epoch"])
