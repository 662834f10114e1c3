"""The journal next to an unfinished bank: it records the accepted probes, so that generation can resume."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cplus import locks
from cplus.files import canonical_json, open_itself, sync

FORMAT = "cplus-journal/1"


class Journal:
    """Lines of JSON, each on disk before the next is started; the first line identifies the bank."""

    def __init__(self, file: IO[bytes], entries: list[dict[str, Any]]) -> None:
        self._file = file
        self.entries = entries

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add an entry; once this returns, the entry survives a crash."""
        _write(self._file, entry)
        self.entries.append(dict(entry))


def journal_path(folder: Path) -> Path:
    """The journal of a bank: next to its folder, so that an unsealed folder never exists."""
    return folder.with_name(f"{folder.name}.partial.jsonl")


@contextmanager
def open_journal(
    path: Path,
    identity: Mapping[str, Any],
    *,
    wait: float = 0.0,
    notify: Callable[[str], None] = lambda sentence: None,
) -> Iterator[Journal]:
    """Open a journal for one process at a time; the error for a journal of another bank names the differences."""
    lock = locks.holding(locks.beside(path), wait=wait, notify=notify, otherwise="wait for it or choose another --out")
    with lock, open(path, "ab+", opener=open_itself) as file:
        lines = _whole_lines(file)
        head = {"format": FORMAT, "identity": json.loads(canonical_json(identity))}
        if not lines:
            _write(file, head)
            sync(path.parent)
        elif lines[0] != head:
            raise ValueError(f"{path} was started {_difference(lines[0], head)}; use those values, or remove the file")
        yield Journal(file, lines[1:])


def _whole_lines(file: IO[bytes]) -> list[dict[str, Any]]:
    """All entries; a last line that a crash or a full disk cut short is removed from the file."""
    file.seek(0)
    entries, end = [], 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        try:
            entries.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{file.name}: line {len(entries) + 1} is damaged; remove the file and start again"
            ) from error
        end += len(line)
    file.truncate(end)
    file.seek(0, os.SEEK_END)
    return entries


def _write(file: IO[bytes], entry: Mapping[str, Any]) -> None:
    file.write(canonical_json(entry).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _difference(found: Any, expected: Mapping[str, Any]) -> str:
    if not isinstance(found, dict) or not isinstance(found.get("identity"), dict):
        return "with a damaged first line"
    if found.get("format") != FORMAT:
        return f"in the format {found.get('format')!r} and not {FORMAT!r}"
    old, new = _flat(found["identity"]), _flat(expected["identity"])
    keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return "with " + ", ".join(f"{key} {old.get(key)!r:.40} and not {new.get(key)!r:.40}" for key in keys)


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return flat
