"""Files of examples: JSONL, JSON, CSV and Parquet in one schema; what is wrong is named by file and line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from cplus.data.examples import Choice, Example, from_row

Rows: TypeAlias = Iterable[tuple[str, Mapping[str, Any]]]  # (where the row stands, the row)

DATA_EXTRA = "pip install 'cplus[data]'"


def read_file(path: Path) -> list[Example]:
    """Every example of a file; its ending says the format."""
    if path.suffix not in _READERS:
        raise ValueError(f"{path}: expected a file ending in {', '.join(_READERS)}, got {path.suffix or 'no ending'!r}")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    return to_examples(_READERS[path.suffix](path), name=path.stem, source=str(path))


def to_examples(rows: Rows, *, name: str, source: str) -> list[Example]:
    """Rows as examples of one kind with distinct ids; a row without an id is called by `name` and its number."""
    examples: list[Example] = []
    seen: dict[str, str] = {}
    for number, (where, row) in enumerate(rows, start=1):
        example = from_row(row, where=where, id=f"{name}-{number:04d}")
        if example.id in seen:
            raise ValueError(f"{where}: the id {example.id!r} was given before, at {seen[example.id]}; ids must differ")
        if isinstance(example, Choice) and len(example.choices) < 2:
            raise ValueError(f"{where}: expected at least two choices to choose from, got {example.choices!r:.60}")
        if examples and type(example) is not type(examples[0]):
            raise ValueError(
                f"{where}: expected one kind of row in a file, but this one is {type(example).__name__} "
                f"and the first is {type(examples[0]).__name__}; put them in two files"
            )
        seen[example.id] = where
        examples.append(example)
    if not examples:
        raise ValueError(f"{source}: expected at least one example, but it is empty")
    return examples


def _text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")  # spreadsheets put a byte-order mark in front
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: expected UTF-8 text, got the byte {raw[error.start]:#04x}") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected JSON, but it does not parse: {error}") from error


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    # Not splitlines: that also cuts at U+2028 and others, which JSON strings may hold.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    rows = _parse(_text(path), str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of rows, got {type(rows).__name__}; one row a line is .jsonl")
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))


def _csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Cells of `choices` and `messages` hold JSON lists; those of `answer` hold the index."""
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        for cells in reader:
            where = f"{path}:{reader.line_num}"
            if None in cells or None in cells.values():
                raise ValueError(f"{where}: expected {len(reader.fieldnames or ())} cells, as in the header")
            yield where, {key: _cell(key, value, where) for key, value in cells.items()}
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: expected CSV, but it does not parse: {error}") from error


def _cell(key: str, value: str, where: str) -> Any:
    return _parse(value, f"{where}: {key}") if key in ("choices", "messages", "answer") else value


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading Parquet needs pyarrow: {DATA_EXTRA}") from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: expected a Parquet file, but it does not read: {error}") from error
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
ENDINGS = tuple(_READERS)
