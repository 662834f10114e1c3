"""Data sets of the hub, and the public benchmarks there rewritten in this project's schema."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from cplus.data.readers import DATA_EXTRA, Columns, Found, collect, renamed

Row: TypeAlias = Mapping[str, Any]


def _same(row: Row) -> Row:
    return row


@dataclass(frozen=True, kw_only=True)
class Hub:
    """A data set of the hub, and how one of its rows reads in this project's schema."""

    path: str
    config: str | None = None
    split: str | None = None
    rewrite: Callable[[Row], Row] = _same


def parse(name: str) -> Hub:
    """Read `owner/name`, `owner/name:config` or either with `@split`.

    >>> hub = parse("allenai/ai2_arc:ARC-Easy@test")
    >>> hub.path, hub.config, hub.split
    ('allenai/ai2_arc', 'ARC-Easy', 'test')
    """
    rest, _, split = name.partition("@")
    path, _, config = rest.partition(":")
    return Hub(path=path, config=config or None, split=split or None)


def read(hub: Hub, *, name: str, columns: Columns | None = None, requests: bool = False) -> Found:
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
    rows = renamed(_rows(found, hub), columns)
    return collect(rows, name=name, source=hub.path, requests=requests)


_SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` writes beside the rows


def _rows(found: Any, hub: Hub) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(found, start=1):
        where = f"{hub.path}: row {number}"
        try:
            rewritten = hub.rewrite(row)
        except (KeyError, ValueError, TypeError) as error:
            keys = ", ".join(sorted(row))
            raise ValueError(f"{where}: not in the known form ({error!r}); it has the keys {keys}") from error
        yield where, rewritten


def _labelled(question: str) -> Callable[[Row], Row]:
    """Choices with labels, and the label of the right one."""

    def rewrite(row: Row) -> Row:
        choices = row["choices"]
        answer = list(choices["label"]).index(row["answerKey"])
        return {"id": row["id"], "question": row[question], "choices": list(choices["text"]), "answer": answer}

    return rewrite


def _shuffled(question: str, right: str, wrong: list[str]) -> Row:
    """The source puts the right choice first; the question itself seeds where it goes."""
    choices = [right, *wrong]
    random.Random(question).shuffle(choices)
    return {"question": question, "choices": choices, "answer": choices.index(right)}


def _mmlu(row: Row) -> Row:
    return {"question": row["question"], "choices": row["choices"], "answer": int(row["answer"])}


def _medqa(row: Row) -> Row:
    letters = sorted(row["options"])
    choices = [row["options"][letter] for letter in letters]
    return {"question": row["question"], "choices": choices, "answer": letters.index(row["answer_idx"])}


def _hellaswag(row: Row) -> Row:
    question = f"{row['activity_label']}: {row['ctx']}"
    return {"question": question, "choices": row["endings"], "answer": int(row["label"])}


def _piqa(row: Row) -> Row:
    return {"question": row["goal"], "choices": [row["sol1"], row["sol2"]], "answer": int(row["label"])}


def _winogrande(row: Row) -> Row:
    choices = [row["option1"], row["option2"]]
    return {"question": row["sentence"], "choices": choices, "answer": int(row["answer"]) - 1}


def _boolq(row: Row) -> Row:
    question = f"{row['passage']}\nQuestion: {row['question']}?"
    return {"question": question, "choices": ["yes", "no"], "answer": 0 if row["answer"] else 1}


def _social_iqa(row: Row) -> Row:
    choices = [row["answerA"], row["answerB"], row["answerC"]]
    return {"question": f"{row['context']} {row['question']}", "choices": choices, "answer": int(row["label"]) - 1}


def _sciq(row: Row) -> Row:
    wrong = [row["distractor1"], row["distractor2"], row["distractor3"]]
    return _shuffled(row["question"], row["correct_answer"], wrong)


def _truthfulqa(row: Row) -> Row:
    targets = row["mc1_targets"]
    choices = list(targets["choices"])
    right = choices.pop(list(targets["labels"]).index(1))
    return _shuffled(row["question"], right, choices)


def _copa(row: Row) -> Row:
    asked = "What was the cause of this?" if row["question"] == "cause" else "What happened as a result?"
    choices = [row["choice1"], row["choice2"]]
    return {"question": f"{row['premise']} {asked}", "choices": choices, "answer": int(row["label"])}


def _gsm8k(row: Row) -> Row:
    return {"prompt": row["question"], "response": row["answer"]}


def _arc(config: str, split: str) -> Hub:
    return Hub(path="allenai/ai2_arc", config=config, split=split, rewrite=_labelled("question"))


def _openbookqa(split: str) -> Hub:
    return Hub(path="allenai/openbookqa", config="main", split=split, rewrite=_labelled("question_stem"))


def _csqa(split: str) -> Hub:
    return Hub(path="tau/commonsense_qa", split=split, rewrite=_labelled("question"))


BENCHMARKS: dict[str, Hub] = {
    "csqa": _csqa("validation"),
    "arc_c": _arc("ARC-Challenge", "test"),
    "mmlu": Hub(path="cais/mmlu", config="all", split="test", rewrite=_mmlu),
    "medqa": Hub(path="GBaker/MedQA-USMLE-4-options", split="test", rewrite=_medqa),
    "hellaswag": Hub(path="Rowan/hellaswag", split="validation", rewrite=_hellaswag),
    "piqa": Hub(path="baber/piqa", split="validation", rewrite=_piqa),
    "winogrande": Hub(path="allenai/winogrande", config="winogrande_xl", split="validation", rewrite=_winogrande),
    "openbookqa": _openbookqa("test"),
    "boolq": Hub(path="google/boolq", split="validation", rewrite=_boolq),
    "social_iqa": Hub(path="lighteval/siqa", split="validation", rewrite=_social_iqa),
    "arc_easy": _arc("ARC-Easy", "test"),
    "sciq": Hub(path="allenai/sciq", split="test", rewrite=_sciq),
    "truthfulqa": Hub(path="truthfulqa/truthful_qa", config="multiple_choice", split="validation", rewrite=_truthfulqa),
    "copa": Hub(path="aps/super_glue", config="copa", split="validation", rewrite=_copa),
    "gsm8k": Hub(path="openai/gsm8k", config="main", split="test", rewrite=_gsm8k),
    "csqa_train": _csqa("train"),
    "arc_easy_train": _arc("ARC-Easy", "train"),
    "arc_challenge_train": _arc("ARC-Challenge", "train"),
    "sciq_train": Hub(path="allenai/sciq", split="train", rewrite=_sciq),
    "openbookqa_train": _openbookqa("train"),
}
