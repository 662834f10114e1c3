"""Rows from files, the hub and lm-evaluation-harness; what is wrong is named by file and line."""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import math
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from cplus.data.examples import Choice, Example
from cplus.data.formats import FIELDS, MIXED, Format, Row, check_once, from_row, parsed, recognise

# Files of examples: JSONL, JSON, CSV, TSV and Parquet.


Rows: TypeAlias = Iterable[tuple[str, Row]]  # (where the row is, the row)
Columns: TypeAlias = Mapping[str, str]
"""Names of a format's fields, each with the name it has in the file."""

DATA_EXTRA = "pip install 'cplus[data]'"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The examples of a file or a data set, and one line on the format they were read from."""

    examples: tuple[Example, ...]
    detected: str


def read_file(path: Path) -> list[Example]:
    """Every example of a file; its ending tells the kind of file, its keys the format of the rows."""
    return list(read_rows(path).examples)


def read_rows(path: Path, *, columns: Columns | None = None, requests: bool = False) -> Found:
    """The examples of a file and their format; `requests` admits rows without a response."""
    packed = path.suffix == ".gz"
    plain = path.with_suffix("") if packed else path
    if plain.suffix not in _READERS or (packed and plain.suffix == ".parquet"):
        raise ValueError(
            f"{path}: expected a file ending in {', '.join(_READERS)}, or in one of the text formats and .gz, "
            f"got {path.name!r}"
        )
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    rows = renamed(_READERS[plain.suffix](path), columns)
    if plain.suffix in _DELIMITERS:
        rows = ((where, {key: _cell(key, value, where) for key, value in row.items()}) for where, row in rows)
    return collect(rows, name=plain.stem, source=str(path), requests=requests)


def collect(rows: Rows, *, name: str, source: str, requests: bool = False) -> Found:
    """Rows as examples with distinct ids, and the format they have; a row without an id is called by `name` and number.

    >>> collect([("row 1", {"prompt": "2 + 2?", "response": "4", "source": "web"})], name="row", source="rows").detected
    'prompt-response rows: prompt, response; 1 read; not used: source'
    """
    examples: dict[str, Example] = {}
    places: dict[str, str] = {}
    formats: dict[str, Format] = {}
    keys: dict[str, None] = {}
    for number, (where, row) in enumerate(rows, start=1):
        own = recognise(row, where=where, requests=requests)
        example = from_row(row, where=where, id=f"{name}-{number:04d}", requests=requests)
        if example.id in examples:
            raise ValueError(f"{where}: the id {example.id!r} was given before, at {places[example.id]}; change one")
        if isinstance(example, Choice) and len(example.choices) < 2:
            raise ValueError(f"{where}: expected at least two choices to choose from, got {example.choices!r:.60}")
        first = next(iter(formats.values()), own)
        if own != first and not (own in MIXED and first in MIXED):
            raise ValueError(
                f"{where}: expected one format in a file, but this row is {own.name} and the first is {first.name}; "
                "put them in two files"
            )
        formats[own.name] = own
        keys |= dict.fromkeys(map(str, row))
        examples[example.id], places[example.id] = example, where
    if not examples:
        raise ValueError(f"{source}: expected at least one example, but it is empty")
    known = {key for one in formats.values() for key in (*one.keys, *one.optional)}
    lacking = sum(not isinstance(example, Choice) and not example.answered for example in examples.values())
    unused = ", ".join(key for key in keys if key not in known and key != "id")
    detected = (
        f"{' and '.join(formats)} rows: {', '.join(key for key in keys if key in known)}",
        f"{len(examples)} read",
        lacking and f"{lacking} without a response",
        unused and f"not used: {unused}",
        first.note,
    )
    return Found(examples=tuple(examples.values()), detected="; ".join(filter(None, map(str, filter(None, detected)))))


def renamed(rows: Rows, columns: Columns | None) -> Rows:
    """The rows with the names that formats have for their columns.

    >>> list(renamed([("row 1", {"question": "2 + 2?", "answer": "4"})], {"prompt": "question", "response": "answer"}))
    [('row 1', {'prompt': '2 + 2?', 'response': '4'})]
    """
    columns = columns or {}
    if unknown := [name for name in columns if name not in FIELDS]:
        raise ValueError(f"expected columns to name some of {', '.join(FIELDS)}, got {', '.join(unknown)}")
    for where, row in rows:
        if not columns or not isinstance(row, Mapping):
            yield where, row
            continue
        if absent := [f"{source!r} for {name}" for name, source in columns.items() if source not in row]:
            found = ", ".join(sorted(map(str, row))) or "none"
            raise ValueError(f"{where}: expected the column {absent[0]}, found {found}; correct columns")
        rest = {key: value for key, value in row.items() if key not in (*columns, *columns.values())}
        yield where, rest | {name: row[source] for name, source in columns.items()}


def parse_columns(text: str) -> dict[str, str]:
    """Columns as the command line takes them.

    >>> parse_columns("prompt=question,response=answer")
    {'prompt': 'question', 'response': 'answer'}
    """
    pairs = [[part.strip() for part in pair.partition("=")] for pair in text.split(",")]
    columns = {name: source for name, _, source in pairs}
    if not all(name and source for name, source in columns.items()) or len(columns) < len(pairs):
        raise ValueError(f"expected columns as prompt=question,response=answer, each name once, got {text!r}")
    return columns


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
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f"expected a weight above 0 after the file, as in b.jsonl=0.5, got {text!r}")
    return name, weight


def _text(path: Path) -> str:
    raw = path.read_bytes()
    if path.suffix == ".gz":
        limit = max(2**26, 200 * len(raw))  # text packs to a tenth or so; what packs a thousandfold is no text
        try:
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


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    # Not splitlines: that also cuts at U+2028 and others, which JSON strings may hold.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", parsed(line, f"{path}:{number}")


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    rows = parsed(_text(path), str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of rows, got {type(rows).__name__}; one row per line is .jsonl")
    yield from _numbered(path, rows)


def _numbered(source: object, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{source}: row {number}", row) for number, row in enumerate(rows, start=1))


def _table(path: Path) -> Iterator[tuple[str, Row]]:
    """Rows of CSV or TSV, every cell a text."""
    delimiter = _DELIMITERS[Path(path.name.removesuffix(".gz")).suffix]
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True, delimiter=delimiter)
    try:
        check_once(filter(None, reader.fieldnames or ()), f"{path}:1: ")
        for cells in reader:
            where = f"{path}:{reader.line_num}"
            if None in cells or None in cells.values():
                raise ValueError(f"{where}: expected {len(reader.fieldnames or ())} cells, as in the header")
            yield where, cells
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: expected a table, but it does not parse: {error}") from error


_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def _cell(key: str, value: str, where: str) -> Any:
    """The value of a table's cell: lists and the index of an answer are JSON."""
    return parsed(value, f"{where}: {key}") if key in ("choices", "messages", "answer", "conversations") else value


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading Parquet needs pyarrow: {DATA_EXTRA}") from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: expected a Parquet file, but it does not read: {error}") from error
    yield from _numbered(path, rows)


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
}
ENDINGS = (*_READERS, ".gz")


# Data sets of the hub, and the public benchmarks there rewritten in this project's schema.


def read_hub(place: str, *, name: str, columns: Columns | None = None, requests: bool = False) -> Found:
    """The rows of `owner/name`, `owner/name:config`, or a folder that `datasets` loads or saved; each with `@split`.

    Those of the public benchmarks are rewritten in this project's schema.
    """
    rest, _, split = place.partition("@")
    path, _, config = rest.partition(":")
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{path}: reading the hub needs the datasets package: {DATA_EXTRA}") from error
    saved = any((Path(path) / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
    try:
        if saved:
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, config or None, split=split or None)
    except (OSError, json.JSONDecodeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"could not read the data set {path!r}: {error.__cause__ or error}; "
            "check its name and the network, or give a file instead"
        ) from error
    if isinstance(found, Mapping):
        if (not split and len(found) != 1) or (split and split not in found):
            raise ValueError(f"{path} has the splits {', '.join(found)}; choose one, e.g. {path}@{next(iter(found))}")
        found = found[split or next(iter(found))]
    elif saved and split:
        raise ValueError(f"{path} was saved without splits; leave @{split} out")
    rows = _numbered(path, found)
    if path in _REWRITES:
        rows = ((where, _rewritten(path, row, where)) for where, row in rows)
    return collect(renamed(rows, columns), name=name, source=path, requests=requests)


def _rewritten(path: str, row: Row, where: str) -> Row:
    try:
        question, choices, answer = _REWRITES[path](row)
    except (KeyError, ValueError, TypeError) as error:
        keys = ", ".join(sorted(row))
        raise ValueError(f"{where}: not in the known form ({error!r}); it has the keys {keys}") from error
    known = {"id": row["id"]} if "id" in row else {}
    if choices is None:
        return {**known, "prompt": question, "response": answer}
    return {**known, "question": question, "choices": list(choices), "answer": int(answer)}


def _labelled(row: Row) -> tuple[str, Iterable[str], int]:
    """Choices with labels, and the label of the right one."""
    asked, choices = row.get("question") or row["question_stem"], row["choices"]
    return asked, choices["text"], list(choices["label"]).index(row["answerKey"])


def _shuffled(question: str, right: str, wrong: list[str]) -> tuple[str, list[str], int]:
    """The source puts the right choice first; the question itself seeds where it goes."""
    choices = [right, *wrong]
    random.Random(question).shuffle(choices)
    return question, choices, choices.index(right)


def _truthfulqa(row: Row) -> tuple[str, list[str], int]:
    choices = list(row["mc1_targets"]["choices"])
    right = choices.pop(list(row["mc1_targets"]["labels"]).index(1))
    return _shuffled(row["question"], right, choices)


def _medqa(row: Row) -> tuple[str, list[str], int]:
    letters = sorted(row["options"])
    return row["question"], [row["options"][letter] for letter in letters], letters.index(row["answer_idx"])


def _copa(row: Row) -> tuple[str, list[str], int]:
    asked = "What was the cause of this?" if row["question"] == "cause" else "What happened as a result?"
    return f"{row['premise']} {asked}", [row["choice1"], row["choice2"]], row["label"]


_REWRITES: dict[str, Callable[[Row], tuple[str, Iterable[str] | None, Any]]] = {
    "tau/commonsense_qa": _labelled,
    "allenai/ai2_arc": _labelled,
    "allenai/openbookqa": _labelled,
    "allenai/sciq": lambda row: _shuffled(
        row["question"], row["correct_answer"], [row[f"distractor{i}"] for i in (1, 2, 3)]
    ),
    "truthfulqa/truthful_qa": _truthfulqa,
    "GBaker/MedQA-USMLE-4-options": _medqa,
    "aps/super_glue": _copa,
    "cais/mmlu": lambda row: (row["question"], row["choices"], row["answer"]),
    "Rowan/hellaswag": lambda row: (f"{row['activity_label']}: {row['ctx']}", row["endings"], row["label"]),
    "baber/piqa": lambda row: (row["goal"], (row["sol1"], row["sol2"]), row["label"]),
    "allenai/winogrande": lambda row: (row["sentence"], (row["option1"], row["option2"]), int(row["answer"]) - 1),
    "google/boolq": lambda row: (f"{row['passage']}\nQuestion: {row['question']}?", ("yes", "no"), not row["answer"]),
    "lighteval/siqa": lambda row: (
        f"{row['context']} {row['question']}", [row[f"answer{letter}"] for letter in "ABC"], int(row["label"]) - 1,
    ),
    "openai/gsm8k": lambda row: (row["question"], None, row["answer"]),
}  # fmt: skip
"""A row's question, choices and the index of the right one; without choices, the response."""


# Tasks of lm-evaluation-harness, by the harness's own names, as rows in this project's schema.


PREFIX = "lm-eval:"
MISSING = "this needs lm-evaluation-harness: pip install 'cplus[lm-eval]'"


def read_harness(name: str) -> Found:
    """The rows that the harness evaluates for a task, a group or a task's YAML file; zero-shot, in its order."""
    try:
        manager = task_manager([name])
    except ImportError as error:
        raise ImportError(f"{PREFIX}{name}: {MISSING}") from error
    if name not in manager.all_tasks and not Path(name).is_file():
        near = difflib.get_close_matches(name, manager.all_tasks, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "'lm-eval ls tasks' lists what there is"
        raise ValueError(f"lm-evaluation-harness knows no task {name!r}; {hint}")
    try:
        tasks = list(manager.load([name])["tasks"].values())
    except OSError as error:
        raise ValueError(f"could not read the data of {PREFIX}{name}: {error}; check the network") from error
    rows = (found for task in tasks for found in _numbered(f"{PREFIX}{task.task_name}", _harness_rows(task)))
    return collect(rows, name=Path(name).stem, source=f"{PREFIX}{name}")


def task_manager(tasks: Iterable[str | dict[str, Any]]) -> Any:
    """The harness's finder of tasks; it reads the harness's own task files only where a task may refer to them."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False) if all(map(_self_contained, tasks)) else _with_defaults(TaskManager)


def _self_contained(task: str | dict[str, Any]) -> bool:
    """Whether a task is a configuration or a file that is no group and includes no other file."""
    if isinstance(task, dict):
        return not task.keys() & {"group", "include"}
    return Path(task).is_file() and not re.search(r"^(group|include)\s*:", Path(task).read_text(), re.MULTILINE)


@cache
def _with_defaults(manager: type[Any]) -> Any:
    """Once per process: reading the harness's thousands of task files takes 10 s of CPU time."""
    return manager()


def _harness_rows(task: Any) -> Iterator[Row]:
    """A task's questions with choices, or its prompts with responses; what is neither is refused."""
    kind = task.get_config("output_type")
    if kind not in ("multiple_choice", "generate_until") or getattr(task, "multiple_input", False):
        reason = "its choices differ in the question" if kind == "multiple_choice" else f"its output type is {kind}"
        raise ValueError(
            f"{PREFIX}{task.task_name} has no rows of one question and its answers: {reason}; the harness itself can "
            f"ask it: cplus evaluate MODEL --task {PREFIX}{task.task_name} --through lm-eval"
        )
    for doc in task.eval_docs:
        asked, answer = str(task.doc_to_text(doc)).strip(), task.doc_to_target(doc)
        if isinstance(answer, list) and answer:  # several wordings of the right answer: the first is the usual one
            answer = answer[0]
        answer = answer.strip() if isinstance(answer, str) else answer
        if kind == "multiple_choice":
            choices = [str(choice).strip() for choice in task.doc_to_choice(doc)]
            answer = choices.index(answer) if answer in choices else answer
            # The words around the question are the interfaces' own.
            question = asked.removeprefix("Question:").removesuffix("Answer:").strip()
            yield {"question": question, "choices": choices, "answer": answer}
        else:
            yield {"prompt": asked, "response": answer}
