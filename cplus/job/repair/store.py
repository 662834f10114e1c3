"""Importance sums on disk, so that a stopped repair continues with the next row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from cplus import files
from cplus.job.checkpoint import read_state
from cplus.job.interruption import Interrupted, Interruption
from cplus.job.progress import say
from cplus.repairing.importance import Sums

FORMAT = "cplus-importance/1"


class SumsOnDisk:
    """One file per set of rows; another repair's sums are refused."""

    def __init__(self, folder: Path, identity: str, minutes: float, interruption: Interruption) -> None:
        self._folder, self._identity, self._minutes = folder, identity, minutes
        self._interruption, self._written = interruption, time.monotonic()

    def load(self, name: str, params: Sequence[Tensor]) -> Sums | None:
        """The sums kept under this name, on the device of the parameters."""
        path = self._path(name)
        if not path.is_file():
            return None
        kept = read_state(path, "remove it to compute it anew")
        if kept.get("format") != FORMAT or kept["identity"] != self._identity:
            raise ValueError(f"{path}: the models, the rows or the version changed since; start a new repair")
        say(f"repair: continued after {kept['rows']} {name.split()[0]} rows")
        tensors = [own.to(p.device, copy=True) for own, p in zip(kept["tensors"], params, strict=True)]
        return Sums(tensors=tensors, rows=kept["rows"])

    def save(self, name: str, sums: Sums, *, complete: bool) -> None:
        """Write complete sums, and others when minutes have passed or the repair is to stop."""
        due = time.monotonic() - self._written >= 60 * self._minutes
        if complete or due or self._interruption.received is not None:
            body = {"format": FORMAT, "identity": self._identity, "rows": sums.rows, "tensors": sums.tensors}
            files.write_state(self._path(name), body)
            self._written = time.monotonic()
        self.check(f"stopped after {sums.rows} {name.split()[0]} rows, and saved")

    def check(self, sentence: str) -> None:
        """Stop here if a signal came."""
        if self._interruption.received is not None:
            raise Interrupted(self._interruption.received, sentence)

    def _path(self, name: str) -> Path:
        return self._folder / f"importance-{name.replace(' ', '-')}.pt"
