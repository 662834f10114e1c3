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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from cplus.data.examples import Choice, Example
from cplus.data.formats import FIELDS, Detected, Format, read_row, recognise

# Files of examples: JSONL, JSON, CSV, TSV and Parquet; what is wrong is named by file and line.


Rows: TypeAlias = Iterable[tuple[str, Mapping[str, Any]]]  # (where the row is, the row)
Columns: TypeAlias = Mapping[str, str]
"""Names of a format's fields, each with the name it has in the file."""

DATA_EXTRA = "pip install 'cplus[data]'"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The examples of a file or a data set, and the format they were read from."""

    examples: tuple[Example, ...]
    detected: Detected | None
    """None for rows that are built in."""


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


# Data sets of the hub, and the public benchmarks there rewritten in this project's schema.


Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Hub:
    """A data set of the hub, and how one of its rows reads in this project's schema."""

    path: str
    config: str | None = None
    split: str | None = None
    rewrite: Callable[[Row], Row] = lambda row: row


def parse(name: str) -> Hub:
    """Read `owner/name`, `owner/name:config` or either with `@split`.

    >>> hub = parse("allenai/ai2_arc:ARC-Easy@test")
    >>> hub.path, hub.config, hub.split
    ('allenai/ai2_arc', 'ARC-Easy', 'test')
    """
    rest, _, split = name.partition("@")
    path, _, config = rest.partition(":")
    return Hub(path=path, config=config or None, split=split or None)


def read_hub(hub: Hub, *, name: str, columns: Columns | None = None, requests: bool = False) -> Found:
    """Fetch a data set of the hub, or open a folder that `datasets` loads or has saved, and read its rows."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{hub.path}: reading the hub needs the datasets package: {DATA_EXTRA}") from error
    saved = any((Path(hub.path) / mark).is_file() for mark in _SAVED)
    try:
        if saved:
            found = datasets.load_from_disk(hub.path)
        else:
            found = datasets.load_dataset(hub.path, hub.config, split=hub.split)
    except (OSError, json.JSONDecodeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"could not read the data set {hub.path!r}: {error.__cause__ or error}; "
            "check its name and the network, or give a file instead"
        ) from error
    if isinstance(found, dict):
        if (hub.split is None and len(found) != 1) or (hub.split is not None and hub.split not in found):
            raise ValueError(
                f"{hub.path} has the splits {', '.join(found)}; choose one, e.g. {hub.path}@{next(iter(found))}"
            )
        found = found[hub.split or next(iter(found))]
    elif saved and hub.split is not None:
        raise ValueError(f"{hub.path} was saved without splits; leave @{hub.split} out")
    rows = renamed(_hub_rows(found, hub), columns)
    return collect(rows, name=name, source=hub.path, requests=requests)


_SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` writes beside the rows


def _hub_rows(found: Any, hub: Hub) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(found, start=1):
        where = f"{hub.path}: row {number}"
        try:
            rewritten = hub.rewrite(row)
        except (KeyError, ValueError, TypeError) as error:
            keys = ", ".join(sorted(row))
            raise ValueError(f"{where}: not in the known form ({error!r}); it has the keys {keys}") from error
        yield where, rewritten


def _choices(question: str, choices: Iterable[str], answer: Any) -> Row:
    return {"question": question, "choices": list(choices), "answer": int(answer)}


def _labelled(question: str) -> Callable[[Row], Row]:
    """Choices with labels, and the label of the right one."""
    return lambda row: {
        "id": row["id"],
        **_choices(row[question], row["choices"]["text"], list(row["choices"]["label"]).index(row["answerKey"])),
    }


def _shuffled(question: str, right: str, wrong: list[str]) -> Row:
    """The source puts the right choice first; the question itself seeds where it goes."""
    choices = [right, *wrong]
    random.Random(question).shuffle(choices)
    return _choices(question, choices, choices.index(right))


def _sciq(row: Row) -> Row:
    return _shuffled(row["question"], row["correct_answer"], [row[f"distractor{i}"] for i in (1, 2, 3)])


def _truthfulqa(row: Row) -> Row:
    choices = list(row["mc1_targets"]["choices"])
    right = choices.pop(list(row["mc1_targets"]["labels"]).index(1))
    return _shuffled(row["question"], right, choices)


def _medqa(row: Row) -> Row:
    letters = sorted(row["options"])
    return _choices(row["question"], map(row["options"].get, letters), letters.index(row["answer_idx"]))


def _copa(row: Row) -> Row:
    asked = "What was the cause of this?" if row["question"] == "cause" else "What happened as a result?"
    return _choices(f"{row['premise']} {asked}", [row["choice1"], row["choice2"]], row["label"])


_REWRITES: dict[str, Callable[[Row], Row]] = {
    "tau/commonsense_qa": _labelled("question"),
    "allenai/ai2_arc": _labelled("question"),
    "allenai/openbookqa": _labelled("question_stem"),
    "allenai/sciq": _sciq,
    "truthfulqa/truthful_qa": _truthfulqa,
    "GBaker/MedQA-USMLE-4-options": _medqa,
    "aps/super_glue": _copa,
    "cais/mmlu": lambda row: _choices(row["question"], row["choices"], row["answer"]),
    "Rowan/hellaswag": lambda row: _choices(f"{row['activity_label']}: {row['ctx']}", row["endings"], row["label"]),
    "baber/piqa": lambda row: _choices(row["goal"], [row["sol1"], row["sol2"]], row["label"]),
    "allenai/winogrande": lambda row: _choices(
        row["sentence"], [row["option1"], row["option2"]], int(row["answer"]) - 1
    ),
    "google/boolq": lambda row: _choices(
        f"{row['passage']}\nQuestion: {row['question']}?", ["yes", "no"], not row["answer"]
    ),
    "lighteval/siqa": lambda row: _choices(
        f"{row['context']} {row['question']}", [row[f"answer{letter}"] for letter in "ABC"], int(row["label"]) - 1
    ),
    "openai/gsm8k": lambda row: {"prompt": row["question"], "response": row["answer"]},
}
_SETS = {
    "csqa": "tau/commonsense_qa@validation",
    "arc_c": "allenai/ai2_arc:ARC-Challenge@test",
    "mmlu": "cais/mmlu:all@test",
    "medqa": "GBaker/MedQA-USMLE-4-options@test",
    "hellaswag": "Rowan/hellaswag@validation",
    "piqa": "baber/piqa@validation",
    "winogrande": "allenai/winogrande:winogrande_xl@validation",
    "openbookqa": "allenai/openbookqa:main@test",
    "boolq": "google/boolq@validation",
    "social_iqa": "lighteval/siqa@validation",
    "arc_easy": "allenai/ai2_arc:ARC-Easy@test",
    "sciq": "allenai/sciq@test",
    "truthfulqa": "truthfulqa/truthful_qa:multiple_choice@validation",
    "copa": "aps/super_glue:copa@validation",
    "gsm8k": "openai/gsm8k:main@test",
    "csqa_train": "tau/commonsense_qa@train",
    "arc_easy_train": "allenai/ai2_arc:ARC-Easy@train",
    "arc_challenge_train": "allenai/ai2_arc:ARC-Challenge@train",
    "sciq_train": "allenai/sciq@train",
    "openbookqa_train": "allenai/openbookqa:main@train",
}
BENCHMARKS = {name: replace(hub := parse(place), rewrite=_REWRITES[hub.path]) for name, place in _SETS.items()}


# Tasks of lm-evaluation-harness, by the harness's own names, as rows in this project's schema.


PREFIX = "lm-eval:"
MISSING = "this needs lm-evaluation-harness: pip install 'cplus[lm-eval]'"


def read_harness(name: str) -> Found:
    """The rows that the harness evaluates for a task, a group or a task's YAML file; zero-shot, in its order."""
    rows = ((f"{PREFIX}{task.task_name}: row {i}", row) for task in _tasks(name) for i, row in _harness_rows(task))
    return collect(rows, name=Path(name).stem, source=f"{PREFIX}{name}")


def question(text: str) -> str:
    r"""The bare question: the words around it are the interfaces' own.

    >>> question("Question: Is ice cold?\nAnswer:")
    'Is ice cold?'
    """
    return text.strip().removeprefix("Question:").removesuffix("Answer:").strip()


def task_manager(tasks: Sequence[str | dict[str, Any]]) -> Any:
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


def _tasks(name: str) -> list[Any]:
    try:
        manager = task_manager([name])
    except ImportError as error:
        raise ImportError(f"{PREFIX}{name}: {MISSING}") from error
    if name not in manager.all_tasks and not Path(name).is_file():
        near = difflib.get_close_matches(name, manager.all_tasks, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "'lm-eval ls tasks' lists what there is"
        raise ValueError(f"lm-evaluation-harness knows no task {name!r}; {hint}")
    try:
        return list(manager.load([name])["tasks"].values())
    except OSError as error:
        raise ValueError(f"could not read the data of {PREFIX}{name}: {error}; check the network") from error


def _harness_rows(task: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """A task's questions with choices, or its prompts with responses; what is neither is refused."""
    kind = task.get_config("output_type")
    if kind not in ("multiple_choice", "generate_until") or getattr(task, "multiple_input", False):
        reason = "its choices differ in the question" if kind == "multiple_choice" else f"its output type is {kind}"
        raise ValueError(
            f"{PREFIX}{task.task_name} has no rows of one question and its answers: {reason}; the harness itself can "
            f"ask it: cplus evaluate MODEL --task {PREFIX}{task.task_name} --through lm-eval"
        )
    for number, doc in enumerate(task.eval_docs, start=1):
        asked, answer = str(task.doc_to_text(doc)).strip(), task.doc_to_target(doc)
        if isinstance(answer, list) and answer:  # several wordings of the right answer: the first is the usual one
            answer = answer[0]
        answer = answer.strip() if isinstance(answer, str) else answer
        if kind == "multiple_choice":
            choices = [str(choice).strip() for choice in task.doc_to_choice(doc)]
            answer = choices.index(answer) if answer in choices else answer
            yield number, {"question": question(asked), "choices": choices, "answer": answer}
        else:
            yield number, {"prompt": asked, "response": answer}
