"""What a person sees: messages and progress on standard error, results on standard output."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table


class _Lasting(Console):
    """A console that goes on without its reader, as in `cplus adapt ... 2>&1 | head`: a job is not lost with it."""

    def on_broken_pipe(self) -> None:
        """Print nowhere from now on; rich would end the process."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def print(self, *objects: Any, **how: Any) -> None:
        """Break lines between words in a terminal; elsewhere a sentence stays on one line, whatever reads it."""
        if "soft_wrap" in how:
            how["soft_wrap"] = not self.is_terminal
        super().print(*objects, **how)


# Names of tasks, files and models are no markup.
console = _Lasting(stderr=True, highlight=False, markup=False, emoji=False)
output = _Lasting(highlight=False, markup=False, emoji=False)

_SECONDS = 30  # between two lines of progress where there is no terminal

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Text from a model or a user with control sequences removed, safe for a terminal.

    >>> clean("a\\x1b[31mred\\x07")
    'ared'
    """
    return _CONTROL.sub("", text)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()) -> None:
    """Print a table; the first column and those of `left` hold words, the others numbers."""
    table = Table(box=None, header_style="bold")
    for place, name in enumerate(columns):
        words = place == 0 or name in left
        table.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for row in rows:
        table.add_row(*row)
    output.print(table)


def print_json(value: Any) -> None:
    """Print the one JSON object of a `--json` command to standard output."""
    output.out(json.dumps(value, ensure_ascii=False, allow_nan=False))


_COLUMNS = (
    SpinnerColumn(),
    TextColumn("{task.description}", markup=False),  # names of files are no markup
    BarColumn(bar_width=10),  # everything fits into 80 columns
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


class _Bars(Progress):
    """Bars in a terminal; elsewhere a plain line about one every 30 seconds at most, none for a short one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        period = 20 * _SECONDS  # rich's own would forget a slow bar between two lines
        super().__init__(
            *_COLUMNS,
            console=console,
            transient=True,
            disable=not console.is_terminal,
            auto_refresh=console.is_terminal,
            speed_estimate_period=period,
            get_time=clock,
        )
        self._printed = clock()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a bar."""
        super().update(task_id, **changes)
        self._print(self._tasks[task_id])

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Move a bar on."""
        super().advance(task_id, advance)
        self._print(self._tasks[task_id])

    def _print(self, task: Task) -> None:
        now = self.get_time()
        if not self.disable or now - self._printed < _SECONDS or task.finished:
            return
        self._printed = now
        total = "" if task.total is None else f" of {task.total:,.0f}"
        left = "" if task.time_remaining is None else f", about {timedelta(seconds=int(task.time_remaining))} left"
        elapsed = timedelta(seconds=int(task.elapsed or 0))
        text = f"{task.description}: {task.completed:,.0f}{total} after {elapsed}{left}"
        console.print(clean(text), markup=False, soft_wrap=True)


def progress(clock: Callable[[], float] = time.monotonic) -> Progress:
    """Progress with rate and time left: bars in a terminal, few lines elsewhere."""
    return _Bars(clock)


def track(items: Iterable[Any], description: str, *, total: int | None = None) -> Iterator[Any]:
    """Iterate with a progress bar."""
    with progress() as bars:
        yield from bars.track(items, description=description, total=total)
