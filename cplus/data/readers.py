"""Files of examples: JSONL, JSON, CSV, TSV and Parquet; what is wrong is named by file and line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from cplus.data.examples import Choice, Example
from cplus.data.formats import FIELDS, Detected, Format, read_row, recognise

Rows: TypeAlias = Iterable[tuple[str, Mapping[str, Any]]]  # (where the row is, the row)
Columns: TypeAlias = Mapping[str, str]
"""Names of a format's fields, each with the name it has in the file."""

DATA_EXTRA = "pip install 'cplus[data]'"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The examples of a file or a data set, and the format they were read from."""

    examples: tuple[Example, ...]
    detected: Detected


def read_file(path: Path) -> list[Example]:
    """Every example of a file; its ending tells the kind of file, its keys the format of the rows."""
    return list(read_rows(path).examples)


def read_rows(path: Path, *, columns: Columns | None = None, requests: bool = False) -> Found:
    """The examples of a file and their format; `requests` admits rows without a response."""
    packed = path.suffix == ".gz"
    plain = path.with_suffix("") if packed else path
    if plain.suffix not in _READERS or (packed and plain.suffix == ".parquet"):
        got = "".join(path.suffixes[-2:]) if packed else path.suffix
        raise ValueError(
            f"{path}: expected a file ending in {', '.join(_READERS)}, or in one of the text formats and .gz, "
            f"got {got or 'no ending'!r}"
        )
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    rows = renamed(_READERS[plain.suffix](path), columns)
    if plain.suffix in _DELIMITERS:
        rows = ((where, {key: _cell(key, value, where) for key, value in row.items()}) for where, row in rows)
    return collect(rows, name=plain.stem, source=str(path), requests=requests)


def to_examples(rows: Rows, *, name: str, source: str) -> list[Example]:
    """Rows as examples of one format with distinct ids; a row without an id is called by `name` and its number."""
    return list(collect(rows, name=name, source=source).examples)


def collect(rows: Rows, *, name: str, source: str, requests: bool = False) -> Found:
    """Rows as examples, and the format they were found to have."""
    examples: list[Example] = []
    seen: dict[str, str] = {}
    formats: dict[str, Format] = {}
    keys: dict[str, None] = {}
    for number, (where, row) in enumerate(rows, start=1):
        own = recognise(row, where=where, requests=requests)
        example = read_row(row, own, where=where, id=f"{name}-{number:04d}", requests=requests)
        if example.id in seen:
            raise ValueError(f"{where}: the id {example.id!r} was given before, at {seen[example.id]}; ids must differ")
        if isinstance(example, Choice) and len(example.choices) < 2:
            raise ValueError(f"{where}: expected at least two choices to choose from, got {example.choices!r:.60}")
        if examples and type(example) is not type(examples[0]):
            raise ValueError(
                f"{where}: expected one kind of row in a file, but this one is {type(example).__name__} "
                f"and the first is {type(examples[0]).__name__}; put them in two files"
            )
        first = next(iter(formats.values()), own)
        if own.family != first.family:
            raise ValueError(
                f"{where}: expected one format in a file, but this row is {own.name} and the first is {first.name}; "
                "put them in two files"
            )
        formats[own.name] = own
        keys |= dict.fromkeys(map(str, row))
        seen[example.id] = where
        examples.append(example)
    if not examples:
        raise ValueError(f"{source}: expected at least one example, but it is empty")
    known = {key for one in formats.values() for key in one.known}
    detected = Detected(
        format=" and ".join(formats),
        keys=tuple(key for key in keys if key in known),
        rows=len(examples),
        requests=sum(not isinstance(example, Choice) and not example.answered for example in examples),
        unused=tuple(key for key in keys if key not in known and key != "id"),
        note=first.note,
    )
    return Found(examples=tuple(examples), detected=detected)


def renamed(rows: Rows, columns: Columns | None) -> Rows:
    """The rows with the names that formats have for their columns.

    >>> list(renamed([("row 1", {"question": "2 + 2?", "answer": "4"})], {"prompt": "question", "response": "answer"}))
    [('row 1', {'prompt': '2 + 2?', 'response': '4'})]
    """
    if not columns:
        return rows
    unknown = [name for name in columns if name not in FIELDS]
    if unknown:
        raise ValueError(f"expected columns to name some of {', '.join(FIELDS)}, got {', '.join(unknown)}")
    return ((where, _renamed(row, columns, where)) for where, row in rows)


def _renamed(row: object, columns: Columns, where: str) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    for name, source in columns.items():
        if source not in row:
            found = ", ".join(sorted(map(str, row))) or "none"
            raise ValueError(f"{where}: expected the column {source!r} for {name}, found {found}; correct columns")
    rest = {key: value for key, value in row.items() if key not in columns and key not in columns.values()}
    return {**rest, **{name: row[source] for name, source in columns.items()}}


def parse_columns(text: str) -> dict[str, str]:
    """Columns as the command line takes them.

    >>> parse_columns("prompt=question,response=answer")
    {'prompt': 'question', 'response': 'answer'}
    """
    pairs = [pair.partition("=") for pair in text.split(",")]
    names = [name.strip() for name, _, _ in pairs]
    if not all(name.strip() and source.strip() for name, _, source in pairs) or len(set(names)) < len(names):
        raise ValueError(f"expected columns as prompt=question,response=answer, each name once, got {text!r}")
    return {name.strip(): source.strip() for name, _, source in pairs}


def weighted(text: str, home: Path | None = None) -> tuple[str, float]:
    """The name and the weight in `name` or `name=weight`; a file that has the whole text as its name comes first.

    >>> weighted("a.jsonl"), weighted("b.jsonl=0.5")
    (('a.jsonl', 1.0), ('b.jsonl', 0.5))
    """
    name, mark, number = text.rpartition("=")
    if not mark or ((home or Path.cwd()) / Path(text).expanduser()).exists():
        return text, 1.0
    try:
        weight = float(number)
    except ValueError:
        if Path(name).suffix not in ENDINGS:  # the sign belongs to the name
            return text, 1.0
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f"expected a weight above 0 after the file, as in b.jsonl=0.5, got {text!r}")
    return name, weight


def _text(path: Path) -> str:
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            limit = max(2**26, 200 * len(raw))  # text packs to a tenth or so; what packs a thousandfold is no text
            with gzip.open(path) as packed:
                raw = packed.read(limit + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: expected a gzip file, but it does not unpack: {error}") from error
        if len(raw) > limit:
            raise ValueError(f"{path}: expected text, which unpacks to less than {limit:,} bytes; unpack it if it is")
    try:
        return raw.decode("utf-8-sig")  # spreadsheets put a byte-order mark in front
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: expected UTF-8 text, got the byte {raw[error.start]:#04x}") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected JSON, but it does not parse: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    check_once(name for name, _ in pairs)
    return dict(pairs)


def check_once(names: Iterable[str], where: str = "") -> None:
    """Refuse a name that is there twice: of its values all but one would be dropped in silence."""
    [(name, times)] = Counter(names).most_common(1) or [("", 1)]
    if times > 1:
        raise ValueError(f"{where}expected each name once, got {name!r} {times} times")


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    # Not splitlines: that also cuts at U+2028 and others, which JSON strings may hold.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    rows = _parse(_text(path), str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of rows, got {type(rows).__name__}; one row per line is .jsonl")
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))


def _table(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of CSV or TSV, every cell a text."""
    kind = Path(path.name.removesuffix(".gz")).suffix
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True, delimiter=_DELIMITERS[kind])
    try:
        check_once(filter(None, reader.fieldnames or ()), f"{path}:1: ")
        for cells in reader:
            where = f"{path}:{reader.line_num}"
            if None in cells or None in cells.values():
                raise ValueError(f"{where}: expected {len(reader.fieldnames or ())} cells, as in the header")
            yield where, cells
    except csv.Error as error:
        raise ValueError(
            f"{path}:{reader.line_num}: expected {kind[1:].upper()}, but it does not parse: {error}"
        ) from error


_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def _cell(key: str, value: str, where: str) -> Any:
    """The value of a table's cell: lists and the index of an answer are JSON."""
    return _parse(value, f"{where}: {key}") if key in ("choices", "messages", "answer", "conversations") else value


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
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
}
ENDINGS = (*_READERS, ".gz")
