"""Seconds by part and peak memory, measured while a job runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from cplus import files, world


@contextmanager
def recorded(path: Path, part: str) -> Iterator[None]:
    """Add the seconds spent inside to those of the part in the file, so that a resumed job knows them all."""
    begun = time.perf_counter()
    yield
    record(path, {part: time.perf_counter() - begun})


def record(path: Path, spent: Mapping[str, float]) -> None:
    """Add the seconds of these parts to those in the file; the first process writes it."""
    if not world.first():
        return
    seconds = recorded_seconds(path)
    files.write_json(path, seconds | {part: seconds.get(part, 0.0) + own for part, own in spent.items()})


def recorded_seconds(path: Path) -> dict[str, float]:
    """The seconds by part that were recorded so far."""
    found: dict[str, float] = files.read_json(path) if path.is_file() else {}
    return found


def since_start() -> float:
    """Seconds since this process was started."""
    return max(0.0, time.time() - float(psutil.Process().create_time()))


class PeakMemory:
    """The peak of the process's memory since this object was created, or on a GPU of the memory allocated there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._earlier = _peak(device)

    def peak(self) -> int | None:
        """Bytes of the whole process, or allocated on the GPU; None where an earlier peak of the process hides it."""
        peak = _peak(self._device)
        return None if self._device.type != "cuda" and peak == self._earlier else peak


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
