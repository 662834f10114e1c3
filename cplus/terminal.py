"""Terminal output: logs and progress on standard error, results on standard output."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

console = Console(stderr=True, highlight=False)
output = Console(highlight=False)

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Text from a model or a user with control sequences removed, safe for a terminal.

    >>> clean("a\\x1b[31mred\\x07")
    'ared'
    """
    return _CONTROL.sub("", text)


def print_json(value: Any) -> None:
    """Print the one JSON object of a `--json` command to standard output."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.1f}/s", style="cyan")


@contextmanager
def progress() -> Iterator[Progress]:
    """Progress bars on standard error with rate and time left; none if it is not a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),  # file names are not markup
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        yield bars


def track(items: Iterable[Any], description: str, *, total: int | None = None) -> Iterator[Any]:
    """Iterate with a progress bar."""
    with progress() as bars:
        yield from bars.track(items, description=description, total=total)
