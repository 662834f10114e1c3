"""One task put to one model, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from cplus.data import predictions as stored
from cplus.data.examples import Choice, Example, fingerprint
from cplus.data.predictions import Prediction
from cplus.evaluation import letters, summaries
from cplus.evaluation.judges import Judge
from cplus.evaluation.outcomes import flips
from cplus.files import read_json
from cplus.interfaces import Interface
from cplus.scoring import log_likelihoods, predict


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A task's rows, the interface they go through, and the judge of answers in words, if there is one."""

    name: str
    interface: Interface
    examples: tuple[Example, ...]
    judge: Judge | None


def ask(model: nn.Module, asked: Asked, *, max_new_tokens: int = 256) -> tuple[list[Prediction], dict[str, Any]]:
    """The model's answers, and their summary; free-form rows are also scored by their responses' likelihood."""
    predictions = predict(
        model, asked.interface, asked.examples, judge=asked.judge, max_new_tokens=max_new_tokens, what=asked.name
    )
    summary: dict[str, Any] = {"task": asked.name, "interface": asked.interface.name}
    summary |= summaries.answered(predictions, asked.examples)
    if not isinstance(asked.examples[0], Choice):
        rows = [asked.interface.encode(example) for example in asked.examples]
        scores = log_likelihoods(model, rows, what=f"{asked.name}: responses")
        summary["responses"] = summaries.responses(
            [score.total for score in scores], [score.num_tokens for score in scores]
        )
    return predictions, summary


def ask_permuted(model: nn.Module, asked: Asked) -> dict[str, Any]:
    """The summary of asking with every cyclic permutation of the options."""
    if asked.interface.name != "letter":
        raise ValueError(f"options stand in an order only for the letter interface, not for {asked.interface.name}")
    what = f"{asked.name}: permuted"
    return letters.permuted(lambda rows: predict(model, asked.interface, rows, what=what), asked.examples).row()


def against(path: Path, asked: Asked, after: Sequence[Prediction]) -> dict[str, Any]:
    """The comparison with predictions stored by `cplus split` for the same rows and interface."""
    record = read_json(path)
    try:
        before = [stored.from_row(row) for row in record["predictions"]]
        known = {"interface": record["interface"], "data_fingerprint": record["data_fingerprint"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected predictions as 'cplus split' writes them; {error} is missing") from error
    expected = {"interface": asked.interface.name, "data_fingerprint": fingerprint(asked.examples)}
    if known != expected:
        raise ValueError(
            f"{path}: expected predictions of the same rows and interface, {json.dumps(expected)}, "
            f"but they were stored for {json.dumps(known)}"
        )
    return summaries.compared(flips(before, after), asked.examples)
