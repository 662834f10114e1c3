"""Checkpoints: one file that is the old state or the new one at every instant."""

from __future__ import annotations

import pickle
import struct
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from cplus import files, world
from cplus.experiment.driver import Training
from cplus.job.progress import say

FORMAT = "cplus-checkpoint/2"
DAMAGED = (
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    LookupError,
    struct.error,
    zlib.error,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)
"""What reading a damaged archive raises."""


class Checkpoints:
    """Writes the last state of a training and reads it again; another job's state is refused."""

    def __init__(self, path: Path, identity: str, *, minutes: float, steps: int | None) -> None:
        self._path, self._identity = path, identity
        self._minutes, self._steps = minutes, steps
        self._written = time.monotonic()
        self.step: int | None = None
        """The update after which the last checkpoint was written."""
        self.done = False
        """Whether the last checkpoint is that of a training at its end."""

    def load(self, training: Training) -> bool:
        """Restore the last state, if there is one."""
        if not self._path.is_file():
            return False
        try:
            # Mapped, not read: the states are copied into place one tensor at a time.
            check_whole(self._path)
            kept: dict[str, Any] = torch.load(self._path, map_location="cpu", weights_only=True, mmap=True)
        except DAMAGED as error:
            raise ValueError(
                f"{self._path}: expected a complete checkpoint, but it cannot be read ({error}); remove it to "
                "train from the beginning"
            ) from error
        if not isinstance(kept, dict) or kept.get("format") != FORMAT:
            raise ValueError(f"{self._path}: expected the format {FORMAT}; it was written by another version")
        if kept["identity"] != self._identity:
            raise ValueError(
                f"{self._path}: the model, the rows or the bank changed since the job began; start a new job"
            )
        if kept["numerics"] != _numerics():
            say(f"the job began with {kept['numerics']} and continues with {_numerics()}: the last bits may differ")
        training.load_state_dict(kept["state"])
        self.step, self.done = training.log.cursor.step, training.log.done
        world.agree("the checkpoint they resume from", self.step)
        return True

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
        body = {"format": FORMAT, "identity": self._identity, "numerics": _numerics()}
        state = training.state_dict()
        if world.first():
            files.write_state(self._path, {**body, "state": state})
        self._written, self.step, self.done = time.monotonic(), training.log.cursor.step, training.log.done


def check_whole(path: Path) -> None:
    """Read every part against its checksum: a mapped file would return a flipped bit unnoticed."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"{damaged} does not match its checksum")


def _numerics() -> str:
    """The library version and thread count, which decide the last bits of a sum."""
    return f"torch {torch.__version__} on {torch.get_num_threads()} threads"
