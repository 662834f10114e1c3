"""Tasks by name: the paper's benchmarks, external and free-form ones, the harness's, the toy world, a user's file."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

from cplus.data import harness, hub
from cplus.data.building import cached, folder_of
from cplus.data.examples import Choice, Example, fingerprint
from cplus.data.formats import Detected
from cplus.data.generated import JSON_REQUESTS, json_requests
from cplus.data.readers import ENDINGS, Columns, Found, read_rows
from cplus.toy import world

InterfaceName: TypeAlias = Literal["letter", "cloze", "freeform"]


@dataclass(frozen=True, kw_only=True)
class Known:
    """A named task's usual interface and the wording that its letter prompt ends with."""

    interface: InterfaceName
    wording: str = "standard"


PAPER: dict[str, Known] = {
    "csqa": Known(interface="letter"),
    "arc_c": Known(interface="letter"),
    "mmlu": Known(interface="letter"),
    "medqa": Known(interface="letter", wording="medqa"),
}
# Half of the external sets are sentences to complete; with lettered options they would be another task.
_BY_TEXT = Known(interface="cloze")
EXTERNAL: dict[str, Known] = {
    "hellaswag": _BY_TEXT,
    "piqa": _BY_TEXT,
    "winogrande": _BY_TEXT,
    "openbookqa": _BY_TEXT,
    "boolq": _BY_TEXT,
    "social_iqa": _BY_TEXT,
    "arc_easy": _BY_TEXT,
    "sciq": _BY_TEXT,
    "truthfulqa": _BY_TEXT,
    "logiqa": _BY_TEXT,
    "copa": _BY_TEXT,
}
TRAINING: dict[str, Known] = {
    "csqa_train": _BY_TEXT,
    "arc_easy_train": _BY_TEXT,
    "arc_challenge_train": _BY_TEXT,
    "sciq_train": _BY_TEXT,
    "openbookqa_train": _BY_TEXT,
}
_BY_RESPONSE = Known(interface="freeform")
FREEFORM: dict[str, Known] = {"gsm8k": _BY_RESPONSE, "instruct": _BY_RESPONSE, "instruct_short": _BY_RESPONSE}
TASKS: dict[str, Known] = {**PAPER, **EXTERNAL, **TRAINING, **FREEFORM}
BUILT_IN = (*world.DOMAINS, JSON_REQUESTS)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Examples with their name and the interface they usually have."""

    name: str
    examples: tuple[Example, ...]
    interface: InterfaceName
    wording: str
    source: str
    detected: Detected | None = None
    """The format of the rows; None for those that are built in."""

    @cached_property
    def fingerprint(self) -> str:
        """The hash of every row, in order."""
        return fingerprint(self.examples)


def load_task(
    name: str, data_dir: Path | None = None, *, columns: Columns | None = None, requests: bool = False
) -> Task:
    """A named task from `data_dir`, CPLUS_DATA, the cache or the hub; a toy domain; a file; a `datasets` set; lm-eval.

    `columns` maps the names of a file's or a data set's columns; `requests` admits rows there without a response.
    """
    path = Path(name).expanduser()
    if path.suffix in ENDINGS and not name.startswith(harness.PREFIX):
        return _task(name, read_rows(path, columns=columns, requests=requests), source=str(path))
    place = hub.parse(str(path))
    named = name.startswith(harness.PREFIX) or name in TASKS or name in BUILT_IN
    if not named and (Path(place.path).is_dir() or ("/" in name and not name.startswith((".", "~", "/")))):
        found = hub.read(place, name=place.path.rpartition("/")[2], columns=columns, requests=requests)
        return _task(name, found, source=place.path)
    if columns:
        raise ValueError(f"{name}: columns are mapped for a file or a data set of your own, not for a named task")
    return _named(name, data_dir)


def _named(name: str, data_dir: Path | None) -> Task:
    if name.startswith(harness.PREFIX):
        found = harness.read(name.removeprefix(harness.PREFIX))
        return _task(name, found, source=name, known=_BY_TEXT if _closed(found.examples) else _BY_RESPONSE)
    if name in TASKS:
        return _known(name, data_dir)
    if name == JSON_REQUESTS:
        return Task(name=name, examples=json_requests(), interface="freeform", wording="standard", source="built in")
    if name in world.DOMAINS:
        facts = tuple(world.examples(name))
        return Task(name=name, examples=facts, interface="cloze", wording="standard", source="toy")
    names = [*TASKS, *BUILT_IN]
    near = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known names are {', '.join(names)}."
    raise ValueError(
        f"unknown task {name!r}; {hint} "
        "A task may also be a file (.jsonl, .json, .csv, .tsv, .parquet), owner/name on the hub, or lm-eval:NAME"
    )


def _known(name: str, data_dir: Path | None) -> Task:
    folder = folder_of(data_dir)
    if folder is not None:
        path = folder / f"{name}.jsonl"
        if not path.is_file():
            raise ValueError(f"{path}: task {name!r} is not there; expected one JSON row per line. {_remedy(name)}")
        return _task(name, read_rows(path), source=str(path), known=TASKS[name])
    if name in PAPER and (built := cached(name)).is_file():
        return _task(name, read_rows(built), source=str(built), known=TASKS[name])
    if name not in hub.BENCHMARKS:
        raise ValueError(f"task {name!r} is not on the hub in a readable form. {_remedy(name)}")
    place = hub.BENCHMARKS[name]
    return _task(name, hub.read(place, name=name), source=place.path, known=TASKS[name])


def _remedy(name: str) -> str:
    give = f"Give the folder that holds {name}.jsonl with --data-dir or CPLUS_DATA"
    return f"{give}, or neither to fetch it from the hub" if name in hub.BENCHMARKS else give


def _closed(examples: Sequence[Example]) -> bool:
    return isinstance(examples[0], Choice)


def _task(name: str, found: Found, *, source: str, known: Known | None = None) -> Task:
    known = known or Known(interface="letter" if _closed(found.examples) else "freeform")
    return Task(
        name=name,
        examples=found.examples,
        interface=known.interface,
        wording=known.wording,
        source=source,
        detected=found.detected,
    )
