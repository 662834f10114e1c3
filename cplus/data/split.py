"""Rows that the base model answers correctly (past) and incorrectly (new), and the anchors drawn from them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cplus import files, locks
from cplus.data import predictions
from cplus.data.examples import Example, fingerprint
from cplus.data.predictions import Prediction
from cplus.terminal import clean, console

_KEYS = {"model_fingerprint", "data_fingerprint", "interface", "stack", "predictions"}
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
    files.write_json(
        path,
        {
            "model_fingerprint": split.model_fingerprint,
            "data_fingerprint": split.data_fingerprint,
            "interface": split.interface,
            "stack": dict(split.stack),
            "predictions": [predictions.to_row(prediction) for prediction in split.predictions],
        },
    )


def load_split(path: Path, examples: Sequence[Example], *, model_fingerprint: str) -> Split:
    """Read a split of these examples by this model; one of another model or other data is refused."""
    record = files.read_json(path)
    if not isinstance(record, dict) or not set(record) >= _KEYS:
        raise ValueError(f"{path}: expected a stored split with {', '.join(sorted(_KEYS))}; split again")
    for what, expected, remedy in (
        ("model", model_fingerprint, "split again with this model"),
        ("data set", fingerprint(examples), "split again with these examples"),
    ):
        found = str(record[f"{what.split()[0]}_fingerprint"])
        if found != expected:
            raise ValueError(f"{path}: a split of another {what} ({found[:12]}, expected {expected[:12]}); {remedy}")
    try:
        return split(
            examples,
            [predictions.from_row(row) for row in record["predictions"]],
            model_fingerprint=model_fingerprint,
            interface=record["interface"],
            stack=record["stack"],
        )
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
    return (
        *_prefix(split.past, correct, seed, "initially correct"),
        *_prefix(split.new, wrong, seed, "initially wrong"),
    )


def _prefix(pool: tuple[Example, ...], count: int, seed: int, kind: str) -> list[Example]:
    if not 0 <= count <= len(pool):
        raise ValueError(f"asked for {count} {kind} examples as anchors, but there are {len(pool)}; draw fewer")
    return random.Random(seed).sample(pool, len(pool))[:count]
