"""Progress of a job: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.progress import Progress

from cplus.loop import EpochEnded, Event, Refreshed, Stepped
from cplus.probes.generate import Block, Sampled
from cplus.terminal import clean, console, progress

_NAMES = {
    "loss": "loss {:.3f}",
    "admitted": "admitted {:.0%}",
    "acquisition": "Acquisition {:.1f} %",
    "retention": "Retention {:.1f} %",
    "new_nll": "new {:.3f} nats per token",
    "past_nll": "past {:.3f} nats per token",
    "divergence": "KL {:.3f} from the base model",
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

    def show(self, event: Event, admitted: float | None, point: Mapping[str, float] | None) -> None:
        """One event; `point` is the epoch's, where one ended."""
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
            say(
                f"epoch {event.epoch}/{self._epochs}: {described(point)}"
                + (f"; {self._left(event.step)}" if more else "")
            )
            if more:
                self._bars.update(self._bar, description=f"epoch {event.epoch + 1}/{self._epochs}: {self._begins}")

    def _left(self, step: int) -> str:
        spent = time.monotonic() - self._begun
        return f"at most {duration(spent / max(1, step - self._first) * (self._total - step))} left"


@contextmanager
def training_view(*, epochs: int, updates: int, done: int, begins: str) -> Iterator[TrainingView]:
    """The view of a training after `done` updates; `begins` describes the start of an epoch."""
    with progress() as bars:
        yield TrainingView(bars, epochs=epochs, updates=updates, done=done, begins=begins)


@contextmanager
def bank_view(total: int) -> Iterator[Callable[[Sampled | Block], None]]:
    """A bar of accepted probes; without a terminal the job prints a line when the bank is sealed."""
    with progress() as bars:
        bar = bars.add_task("probes", total=total)
        accepted = pending = 0

        def watch(event: Sampled | Block) -> None:
            nonlocal accepted, pending
            if isinstance(event, Block):
                accepted, pending = accepted + len(event.probes), 0
            else:
                pending += event.reason is None
            bars.update(bar, completed=min(total, accepted + pending))

        yield watch
