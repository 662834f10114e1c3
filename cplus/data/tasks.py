"""Tasks by name, and their rows split into those that a model already answers correctly and the rest."""

from __future__ import annotations

import difflib
import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Literal, TypeAlias

from cplus.base import files, locks
from cplus.base.terminal import clean, console
from cplus.data import readers
from cplus.data.examples import (
    BUILT_IN,
    Choice,
    Example,
    FreeForm,
    Message,
    Prediction,
    fingerprint,
    prediction_from_row,
)
from cplus.data.readers import ENDINGS, Columns, Found, read_rows

# Rows that the base model answers correctly (past) and incorrectly (new), and the anchors drawn from them.


@dataclass(frozen=True, kw_only=True)
class Split:
    """Examples that the base model answers correctly (past) and incorrectly (new).

    Paper: Experimental Setting (D_new and the past data). It depends on the numerics: protocol section 5.
    """

    past: tuple[Example, ...]
    new: tuple[Example, ...]
    predictions: tuple[Prediction, ...]
    data_fingerprint: str


def stack(*, device: str = "cpu", compute_dtype: str = "float32") -> dict[str, str]:
    """The versions and precision that a prediction depends on."""
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return {**versions, "device": device, "compute_dtype": compute_dtype}


def split(examples: Sequence[Example], predicted: Sequence[Prediction]) -> Split:
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
        data_fingerprint=fingerprint(examples),
    )


def save_split(split: Split, path: Path, *, model_fingerprint: str, interface: str, stack: Mapping[str, str]) -> None:
    """Write a split and the setting of its evaluation: predictions and fingerprints, not the examples."""
    predictions = [asdict(prediction) for prediction in split.predictions]
    known = {"model_fingerprint": model_fingerprint, "interface": interface, "stack": dict(stack)}
    files.write_json(path, {**known, "data_fingerprint": split.data_fingerprint, "predictions": predictions})


def read_split(path: Path, examples: Sequence[Example]) -> Split:
    """A stored split of these examples."""
    try:
        return split(examples, [prediction_from_row(row) for row in files.read_json(path)["predictions"]])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected a stored split, but it does not read ({error!r}); split again") from error


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
    key = files.fingerprint([model_fingerprint, fingerprint(examples), interface, dict(stack)])
    path = folder / f"split-{key[:24]}.json"
    with locks.holding(locks.beside(path), wait=math.inf, notify=lambda sentence: console.print(clean(sentence))):
        if path.exists():
            return read_split(path, examples)
        files.tidy(folder, path.name)
        made = split(examples, predict())
        save_split(made, path, model_fingerprint=model_fingerprint, interface=interface, stack=stack)
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


_PEOPLE = ("Anna", "Omar", "Lena", "Ivan", "Mia", "Raj", "Noor", "Ben", "Sara", "Tom", "Yuki", "Paul")
_THINGS = ("apples", "books", "lamps", "coats", "maps", "chairs", "pens", "cups")


def json_requests() -> tuple[FreeForm, ...]:
    """Every person with every thing.

    >>> json_requests()[0].messages[0].content
    'Write a JSON object with the keys "name" and "apples" for this sentence, and nothing else: Anna has 3 apples.'
    >>> json_requests()[0].response
    '{"name": "Anna", "apples": 3}'
    """
    made = []
    for (i, person), (j, thing) in product(enumerate(_PEOPLE), enumerate(_THINGS)):
        count = 3 + (7 * i + 5 * j) % 40
        asked = (
            f'Write a JSON object with the keys "name" and "{thing}" for this sentence, and nothing else: '
            f"{person} has {count} {thing}."
        )
        answer = json.dumps({"name": person, thing: count})
        messages = (Message(role="user", content=asked),)
        made.append(FreeForm(id=f"json_requests/{person.lower()}-{thing}", messages=messages, response=answer))
    return tuple(made)


BUILT_IN["json_requests"] = json_requests


# Tasks by name: the paper's benchmarks, external and free-form ones, the harness's, the toy world, a user's file.


InterfaceName: TypeAlias = Literal["letter", "cloze", "freeform"]

PAPER = {
    "csqa": "tau/commonsense_qa@validation",
    "arc_c": "allenai/ai2_arc:ARC-Challenge@test",
    "mmlu": "cais/mmlu:all@test",
    "medqa": "GBaker/MedQA-USMLE-4-options@test",
}
"""The paper's benchmarks, asked by letter, each with its place on the hub."""
EXTERNAL = {
    "hellaswag": "Rowan/hellaswag@validation",
    "piqa": "baber/piqa@validation",
    "winogrande": "allenai/winogrande:winogrande_xl@validation",
    "openbookqa": "allenai/openbookqa:main@test",
    "boolq": "google/boolq@validation",
    "social_iqa": "lighteval/siqa@validation",
    "arc_easy": "allenai/ai2_arc:ARC-Easy@test",
    "sciq": "allenai/sciq@test",
    "truthfulqa": "truthfulqa/truthful_qa:multiple_choice@validation",
    "logiqa": "",
    "copa": "aps/super_glue:copa@validation",
}
"""Sets asked by text: half of them are sentences to complete; with lettered options they would be another task."""
_MORE = {
    "csqa_train": "tau/commonsense_qa@train",
    "arc_easy_train": "allenai/ai2_arc:ARC-Easy@train",
    "arc_challenge_train": "allenai/ai2_arc:ARC-Challenge@train",
    "sciq_train": "allenai/sciq@train",
    "openbookqa_train": "allenai/openbookqa:main@train",
    "gsm8k": "openai/gsm8k:main@test",
    "instruct": "",
    "instruct_short": "",
}
TASKS = {**PAPER, **EXTERNAL, **_MORE}
"""The place of each on the hub; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Examples with their name, the interface they usually have and the wording that a letter prompt ends with."""

    name: str
    examples: tuple[Example, ...]
    interface: InterfaceName
    wording: str = "standard"
    detected: str = ""
    """One line on the format of the rows; empty for those that are built in."""

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
    closed: InterfaceName = "letter"
    folder, harness = str(path).partition("@")[0], name.startswith(readers.PREFIX)
    named = harness or name in TASKS or name in BUILT_IN
    if path.suffix in ENDINGS and not harness:
        found = read_rows(path, columns=columns, requests=requests)
    elif not named and (Path(folder).is_dir() or ("/" in name and not name.startswith((".", "~", "/")))):
        found = readers.read_hub(str(path), name=folder.rpartition("/")[2], columns=columns, requests=requests)
    elif named and columns:
        raise ValueError(f"{name}: columns are mapped for a file or a data set of your own, not for a named task")
    elif harness:
        found, closed = readers.read_harness(name.removeprefix(readers.PREFIX)), "cloze"
    elif name in TASKS:
        found, closed = _known(name, data_dir), "letter" if name in PAPER else "cloze"
    elif name in BUILT_IN:
        found, closed = Found(examples=tuple(BUILT_IN[name]()), detected=""), "cloze"
    else:
        names = [*TASKS, *BUILT_IN]
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known names are {', '.join(names)}."
        raise ValueError(
            f"unknown task {name!r}; {hint} "
            "A task may also be a file (.jsonl, .json, .csv, .tsv, .parquet), owner/name on the hub, or lm-eval:NAME"
        )
    return Task(
        name=name,
        examples=found.examples,
        interface=closed if isinstance(found.examples[0], Choice) else "freeform",
        wording="medqa" if name == "medqa" else "standard",
        detected=found.detected,
    )


def folder_of(data_dir: Path | None) -> Path | None:
    """The folder of benchmark files: the given one, or that of CPLUS_DATA."""
    return data_dir or (Path(os.environ["CPLUS_DATA"]) if os.environ.get("CPLUS_DATA") else None)


def cached(name: str) -> Path:
    """Where a built set is kept."""
    return files.cache_folder() / "data" / f"{name}.jsonl"


def _known(name: str, data_dir: Path | None) -> Found:
    folder, place = folder_of(data_dir), TASKS[name]
    path = cached(name) if folder is None else folder / f"{name}.jsonl"
    if path.is_file() and (folder is not None or name in PAPER):
        return read_rows(path)
    if folder is None and place:
        return readers.read_hub(place, name=name)
    raise ValueError(
        f"{path if folder else 'the hub'}: task {name!r} is not there; give the folder that holds {name}.jsonl, one "
        f"JSON row per line, with data_dir or CPLUS_DATA{', or neither to fetch it from the hub' if place else ''}"
    )
