"""What a running job shows and measures: progress, signals, seconds, memory, trackers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from rich.progress import Progress

from cplus.base import files
from cplus.base.files import fingerprint
from cplus.base.terminal import clean, console, progress
from cplus.data.interfaces import Rejected
from cplus.distributed import processes
from cplus.probes.writing import Outcome
from cplus.training.loop import EpochEnded, Event, Refreshed, Stepped

_NAMES = {
    "loss": "loss {:.3f}",
    "admitted": "admitted {:.0%}",
    "acquisition": "Acquisition {:.1f} %",
    "retention": "Retention {:.1f} %",
    "new_nll": "new {:.3f} nats per token",
    "past_nll": "past {:.3f} nats per token",
    "divergence": "KL {:.3f} on new rows",
}


def described(values: Mapping[str, float]) -> str:
    """Figures as text, in a fixed order.

    >>> described({"retention": 90.0, "loss": 0.5, "epoch": 1.0})
    'loss 0.500, Retention 90.0 %'
    """
    return ", ".join(text.format(values[name]) for name, text in _NAMES.items() if name in values)


def say(text: str) -> None:
    """Print one line on standard error."""
    console.print(clean(text), markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """A time a person can read.

    >>> duration(7.4), duration(75), duration(7260)
    ('7 s', '1:15 min', '2:01 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


class TrainingView:
    """A bar over all updates with what is known so far, and one line per epoch."""

    def __init__(self, bars: Progress, *, epochs: int, updates: int, done: int, begins: str) -> None:
        self._bars, self._epochs, self._total, self._begins = bars, epochs, epochs * updates, begins
        self._bar = bars.add_task(begins, total=self._total, completed=done)
        self._known: dict[str, float] = {}
        self._begun, self._first = time.monotonic(), done

    def show(self, event: Event, admitted: float | None, point: Mapping[str, float] | None, after: float = 0.0) -> None:
        """One event; `point` is the epoch's, where one ended, and `after` the seconds of what follows training."""
        if isinstance(event, Stepped):
            smooth = 0.9 * self._known.get("loss", event.loss) + 0.1 * event.loss
            self._known |= {"loss": smooth} | ({} if admitted is None else {"admitted": admitted})
            text = f"epoch {event.epoch}/{self._epochs}: {described(self._known)}"
            self._bars.update(self._bar, completed=event.step, description=text)
        elif isinstance(event, Refreshed):
            found = ", ".join(f"{name} {loss:.3f}" for name, loss in event.losses.items())
            self._bars.update(self._bar, description=f"epoch {event.epoch}/{self._epochs}: evidence computed ({found})")
        elif isinstance(event, EpochEnded) and point is not None:
            self._known |= point
            more = event.epoch < self._epochs
            spent = (time.monotonic() - self._begun) / max(1, event.step - self._first)
            left = f"; at most {duration(spent * (self._total - event.step) + after)} left" if more else ""
            say(f"epoch {event.epoch}/{self._epochs}: {described(point)}{left}")
            if more:
                self._bars.update(self._bar, description=f"epoch {event.epoch + 1}/{self._epochs}: {self._begins}")


@contextmanager
def bank_view(total: int) -> Iterator[Callable[[Outcome], None]]:
    """A bar of accepted probes; without a terminal the job prints a line when the bank is sealed."""
    with progress() as bars:
        bar = bars.add_task("probes", total=total)
        accepted = pending = 0

        def watch(event: Outcome) -> None:
            nonlocal accepted, pending
            if isinstance(event, dict):
                accepted, pending = accepted + sum(not isinstance(result, Rejected) for result in event.values()), 0
            else:
                pending += not isinstance(event, Rejected)
            bars.update(bar, completed=min(total, accepted + pending))

        yield watch


# Seconds by part and peak memory, measured while a job runs.


@contextmanager
def recorded(path: Path, part: str) -> Iterator[None]:
    """Add the seconds spent inside to those of the part in the file, so that a resumed job knows them all."""
    begun = time.perf_counter()
    yield
    record(path, {part: time.perf_counter() - begun})


def record(path: Path, spent: Mapping[str, float]) -> None:
    """Add the seconds of these parts to those in the file; the first process writes it."""
    if not processes.first():
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


def memory_used(device: torch.device) -> int:
    """Bytes of the whole process now, or allocated on the GPU."""
    return int(torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss)


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


# The curves in a tracker, by accelerate's classes.


PROJECT = "cplus"


def tracker(name: str | None, out: Path, settings: Mapping[str, Any]) -> Any:
    """Accelerate's tracker of that name, or None; the first process of a job logs for all.

    A resumed job continues its run.
    """
    if name is None or not processes.first():
        return None
    from accelerate import PartialState, tracking  # type: ignore[import-untyped]

    key = fingerprint([str(out.resolve()), dict(settings)])
    same = {"resume": "allow", "config": dict(settings)}
    options: dict[str, tuple[str, dict[str, Any]]] = {
        "tensorboard": ("tensorboard", {"logging_dir": out}),
        "wandb": (PROJECT, {"name": out.name, "id": key[:16], "dir": out, **same}),
        "trackio": (PROJECT, {"name": f"{out.name}-{key[:8]}", **same}),
    }
    run, own = options[name]
    found: Any = tracking.LOGGER_TYPE_TO_CLASS[name](run, **own)
    PartialState()  # its loggers ask for it
    try:
        found.start()
    except ImportError as error:
        raise ImportError(f"reporting to {name} needs its package: pip install {name}") from error
    return found
