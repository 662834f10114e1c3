"""Tasks by name, and their rows split into those that a model already answers correctly and the rest."""

from __future__ import annotations

import difflib
import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Literal, TypeAlias

from cplus.base import files, locks
from cplus.base.terminal import clean, console
from cplus.data import examples as predictions
from cplus.data import readers
from cplus.data.examples import BUILT_IN, Choice, Example, FreeForm, Message, Prediction, fingerprint
from cplus.data.formats import Detected
from cplus.data.readers import ENDINGS, Columns, Found, read_rows

# Rows that the base model answers correctly (past) and incorrectly (new), and the anchors drawn from them.


_KEYS = ("model_fingerprint", "data_fingerprint", "interface", "stack", "predictions")
_STACK = ("torch", "transformers", "tokenizers")


@dataclass(frozen=True, kw_only=True)
class Split:
    """Examples that the base model answers correctly (past) and incorrectly (new), and the setting of that evaluation.

    Paper: Experimental Setting (D_new and the past data). It depends on the numerics: protocol section 5.
    """

    past: tuple[Example, ...]
    new: tuple[Example, ...]
    predictions: tuple[Prediction, ...]
    model_fingerprint: str
    data_fingerprint: str
    interface: str
    stack: Mapping[str, str]


def stack(*, device: str = "cpu", compute_dtype: str = "float32") -> dict[str, str]:
    """The versions and precision that a prediction depends on."""
    return {**{name: version(name) for name in _STACK}, "device": device, "compute_dtype": compute_dtype}


def split(
    examples: Sequence[Example],
    predicted: Sequence[Prediction],
    *,
    model_fingerprint: str,
    interface: str,
    stack: Mapping[str, str],
) -> Split:
    """Split the examples by whether the base model's predictions are right; both parts keep the examples' order."""
    by_id = {prediction.id: prediction for prediction in predicted}
    if len(by_id) != len(predicted) or set(by_id) != {example.id for example in examples}:
        raise ValueError(
            f"expected one prediction for each of {len(examples)} examples, got {len(predicted)} predictions "
            f"of {len(by_id)} ids; predict exactly these examples"
        )
    return Split(
        past=tuple(example for example in examples if by_id[example.id].right),
        new=tuple(example for example in examples if not by_id[example.id].right),
        predictions=tuple(by_id[example.id] for example in examples),
        model_fingerprint=model_fingerprint,
        data_fingerprint=fingerprint(examples),
        interface=interface,
        stack=dict(stack),
    )


def save_split(split: Split, path: Path) -> None:
    """Write a split: predictions and fingerprints, not the examples."""
    rows = [predictions.prediction_to_row(prediction) for prediction in split.predictions]
    files.write_json(path, {name: getattr(split, name) for name in _KEYS[:-1]} | {"predictions": rows})


def load_split(path: Path, examples: Sequence[Example], *, model_fingerprint: str) -> Split:
    """Read a split of these examples by this model; one of another model or other data is refused."""
    record = files.read_json(path)
    if not isinstance(record, dict) or not set(record) >= set(_KEYS):
        raise ValueError(f"{path}: expected a stored split with {', '.join(_KEYS)}; split again")
    for what, expected in (("model", model_fingerprint), ("data", fingerprint(examples))):
        found = str(record[f"{what}_fingerprint"])
        if found != expected:
            raise ValueError(f"{path}: a split of another {what} ({found[:12]}, expected {expected[:12]}); split again")
    try:
        predicted = [predictions.prediction_from_row(row) for row in record["predictions"]]
        stored = {name: record[name] for name in ("interface", "stack")}
        return split(examples, predicted, model_fingerprint=model_fingerprint, **stored)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: a prediction in it does not read ({error!r}); remove it and split again") from error


def cached_split(
    folder: Path,
    examples: Sequence[Example],
    predict: Callable[[], Sequence[Prediction]],
    *,
    model_fingerprint: str,
    interface: str,
    stack: Mapping[str, str],
) -> Split:
    """The stored split of exactly this model, data, interface and stack; predicted and stored if there is none."""
    data = fingerprint(examples)
    key = files.fingerprint([model_fingerprint, data, interface, dict(stack)])
    path = folder / f"split-{key[:24]}.json"
    if path.exists():
        return load_split(path, examples, model_fingerprint=model_fingerprint)
    with locks.holding(locks.beside(path), wait=math.inf, notify=lambda sentence: console.print(clean(sentence))):
        if path.exists():  # the other process has created it
            return load_split(path, examples, model_fingerprint=model_fingerprint)
        files.tidy(folder, path.name)
        made = split(examples, predict(), model_fingerprint=model_fingerprint, interface=interface, stack=stack)
        save_split(made, path)
    return made


def draw_anchors(split: Split, num_anchors: int, seed: int) -> tuple[Example, ...]:
    """The first `num_anchors` of one seeded permutation of the past rows; a larger budget contains a smaller one.

    Paper: the anchor set P_A, Experimental Setting.
    """
    return draw_mixture(split, correct=num_anchors, wrong=0, seed=seed)


def draw_mixture(split: Split, *, correct: int, wrong: int, seed: int) -> tuple[Example, ...]:
    """`correct` anchors that were answered correctly and `wrong` that were not, each a prefix of its own permutation.

    Paper: App. "Anchor Composition Across Tasks" (E7).
    """
    drawn: list[Example] = []
    for kind, pool, count in (("correct", split.past, correct), ("wrong", split.new, wrong)):
        if not 0 <= count <= len(pool):
            raise ValueError(
                f"asked for {count} initially {kind} examples as anchors, but there are {len(pool)}; draw fewer"
            )
        drawn += random.Random(seed).sample(pool, len(pool))[:count]
    return tuple(drawn)


# Requests whose answers have a fixed format: a JSON object for a sentence.


JSON_REQUESTS = "json_requests"
_PEOPLE = ("Anna", "Omar", "Lena", "Ivan", "Mia", "Raj", "Noor", "Ben", "Sara", "Tom", "Yuki", "Paul")
_THINGS = ("apples", "books", "lamps", "coats", "maps", "chairs", "pens", "cups")


def json_requests() -> tuple[FreeForm, ...]:
    """Every person with every thing.

    >>> json_requests()[0].messages[0].content
    'Write a JSON object with the keys "name" and "apples" for this sentence, and nothing else: Anna has 3 apples.'
    >>> json_requests()[0].response
    '{"name": "Anna", "apples": 3}'
    """
    return tuple(
        _request(person, thing, 3 + (7 * i + 5 * j) % 40)
        for (i, person), (j, thing) in product(enumerate(_PEOPLE), enumerate(_THINGS))
    )


def _request(person: str, thing: str, count: int) -> FreeForm:
    asked = (
        f'Write a JSON object with the keys "name" and "{thing}" for this sentence, and nothing else: '
        f"{person} has {count} {thing}."
    )
    return FreeForm(
        id=f"{JSON_REQUESTS}/{person.lower()}-{thing}",
        messages=(Message(role="user", content=asked),),
        response=json.dumps({"name": person, thing: count}),
    )


# Tasks by name: the paper's benchmarks, external and free-form ones, the harness's, the toy world, a user's file.


InterfaceName: TypeAlias = Literal["letter", "cloze", "freeform"]


@dataclass(frozen=True, kw_only=True)
class Known:
    """A named task's usual interface and the wording that its letter prompt ends with."""

    interface: InterfaceName
    wording: str = "standard"


_BY_LETTER = Known(interface="letter")
PAPER = {
    **dict.fromkeys(("csqa", "arc_c", "mmlu"), _BY_LETTER),
    "medqa": Known(interface="letter", wording="medqa"),
}
# Half of the external sets are sentences to complete; with lettered options they would be another task.
_BY_TEXT = Known(interface="cloze")
_SENTENCES = ("hellaswag", "piqa", "winogrande", "openbookqa", "boolq", "social_iqa", "arc_easy", "sciq", "truthfulqa")
EXTERNAL = dict.fromkeys((*_SENTENCES, "logiqa", "copa"), _BY_TEXT)
_TRAINED = ("csqa_train", "arc_easy_train", "arc_challenge_train", "sciq_train", "openbookqa_train")
TRAINING = dict.fromkeys(_TRAINED, _BY_TEXT)
_BY_RESPONSE = Known(interface="freeform")
FREEFORM = dict.fromkeys(("gsm8k", "instruct", "instruct_short"), _BY_RESPONSE)
TASKS: dict[str, Known] = {**PAPER, **EXTERNAL, **TRAINING, **FREEFORM}
BUILT_IN[JSON_REQUESTS] = json_requests


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
    harness = name.startswith(readers.PREFIX)
    if path.suffix in ENDINGS and not harness:
        return _task(name, read_rows(path, columns=columns, requests=requests), source=str(path))
    place = readers.parse(str(path))
    named = harness or name in TASKS or name in BUILT_IN
    if not named and (Path(place.path).is_dir() or ("/" in name and not name.startswith((".", "~", "/")))):
        found = readers.read_hub(place, name=place.path.rpartition("/")[2], columns=columns, requests=requests)
        return _task(name, found, source=place.path)
    if columns:
        raise ValueError(f"{name}: columns are mapped for a file or a data set of your own, not for a named task")
    if harness:
        found = readers.read_harness(name.removeprefix(readers.PREFIX))
        return _task(name, found, source=name, choices=_BY_TEXT)
    if name in TASKS:
        return _known(name, data_dir)
    if name in BUILT_IN:
        return _task(name, Found(examples=tuple(BUILT_IN[name]()), detected=None), source="built in", choices=_BY_TEXT)
    names = [*TASKS, *BUILT_IN]
    near = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known names are {', '.join(names)}."
    raise ValueError(
        f"unknown task {name!r}; {hint} "
        "A task may also be a file (.jsonl, .json, .csv, .tsv, .parquet), owner/name on the hub, or lm-eval:NAME"
    )


def folder_of(data_dir: Path | None) -> Path | None:
    """The folder of benchmark files: the given one, or that of CPLUS_DATA."""
    return data_dir or (Path(os.environ["CPLUS_DATA"]) if os.environ.get("CPLUS_DATA") else None)


def cached(name: str) -> Path:
    """Where a built set is kept."""
    return files.cache_folder() / "data" / f"{name}.jsonl"


def _known(name: str, data_dir: Path | None) -> Task:
    folder, known, place = folder_of(data_dir), TASKS[name], readers.BENCHMARKS.get(name)
    path = cached(name) if folder is None else folder / f"{name}.jsonl"
    if path.is_file() and (folder is not None or name in PAPER):
        return _task(name, read_rows(path), source=str(path), choices=known)
    if folder is not None or place is None:
        where = "the hub" if folder is None else path
        raise ValueError(
            f"{where}: task {name!r} is not there; give the folder that holds {name}.jsonl, one JSON row per line, "
            f"with data_dir or CPLUS_DATA{'' if place is None else ', or neither to fetch it from the hub'}"
        )
    return _task(name, readers.read_hub(place, name=name), source=place.path, choices=known)


def _task(name: str, found: Found, *, source: str, choices: Known = _BY_LETTER) -> Task:
    """`choices` is how questions with choices are asked; free text has one way only."""
    known = choices if isinstance(found.examples[0], Choice) else _BY_RESPONSE
    return Task(
        name=name,
        examples=found.examples,
        interface=known.interface,
        wording=known.wording,
        source=source,
        detected=found.detected,
    )
