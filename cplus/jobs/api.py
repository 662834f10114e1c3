"""The package's functions for a script or a notebook, on plain rows, models and tokenizers of the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from cplus.core.evidence import evaluating
from cplus.core.rows import Encoded
from cplus.data import interfaces
from cplus.data.examples import Example, Prediction
from cplus.data.readers import collect
from cplus.evaluation.abilities import GENERAL
from cplus.evaluation.judges import chosen
from cplus.evaluation.task import evaluate_task
from cplus.models import of
from cplus.probes.bank import Bank
from cplus.probes.build import cached_bank
from cplus.probes.settings import ProbeSettings
from cplus.probes.writing import writing
from cplus.receipts.contents import Receipt
from cplus.receipts.page import read_receipt

Rows: TypeAlias = "str | Path | Iterable[Example | Mapping[str, Any]]"
"""A file, the name of a task, or rows: examples, or plain dictionaries such as a line of JSONL holds."""


def read(rows: Rows) -> list[Example]:
    """Rows as examples; what is wrong with one is named by its number.

    >>> read([{"prompt": "2 + 2?", "response": "4"}])[0].response
    '4'
    """
    if isinstance(rows, str | Path):
        from cplus.data.tasks import load_task

        return list(load_task(str(rows)).examples)
    listed = list(rows)
    if all(isinstance(row, Mapping) for row in listed):
        numbered = [(f"row {number}", row) for number, row in enumerate(listed, start=1) if isinstance(row, Mapping)]
        return list(collect(numbered, name="row", source="rows").examples)
    wrong = [type(row).__name__ for row in listed if isinstance(row, Mapping) or not hasattr(row, "id")]
    if wrong:
        raise TypeError(f"expected rows that are all dictionaries or all examples, got {', '.join(sorted(set(wrong)))}")
    return [row for row in listed if not isinstance(row, Mapping)]


def encode(rows: Rows, tokenizer: Any, *, interface: str = "freeform", chat: bool = True) -> list[Encoded]:
    """Rows as the tokens that training and evidence see; `chat=False` asks in plain text."""
    bound = interfaces.build(interface, tokenizer, chat=chat)
    return [bound.encode(example) for example in read(rows)]


def probe(
    model: Any,
    tokenizer: Any,
    anchors: Rows | None = None,
    *,
    num_probes: int = 64,
    interface: str = "freeform",
    chat: bool = True,
    shots: int = 2,
    temperature: float = 0.8,
    seed: int = 0,
    banks: Path | None = None,
) -> Bank:
    """A bank of self-probes: new inputs like the anchors, written and answered by the model as it is now.

    Without anchors the model writes general requests, or plain texts where it has no chat template. The bank is sealed
    in the folder `banks`, by default in the cache, and read from there the next time; `encode(bank.examples,
    tokenizer)` makes the rows that `protect` takes.
    """
    rows = [] if anchors is None else read(anchors)
    chat = chat and bool(rows or getattr(tokenizer, "chat_template", None))
    bound = interfaces.build(interface, tokenizer, chat=chat)
    settings = ProbeSettings(num_probes=num_probes, shots=shots, temperature=temperature, seed=seed)
    if not rows:
        settings = writing(bound, GENERAL, num_probes, temperature=temperature, seed=seed)
    with evaluating(model):
        return cached_bank(of(model, tokenizer), bound, rows, settings, banks=banks)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A model's answers to rows, and their summary."""

    summary: Mapping[str, Any]
    predictions: Sequence[Prediction]

    def __repr__(self) -> str:
        right = sum(prediction.right for prediction in self.predictions)
        return f"Evaluation({right} of {len(self.predictions)} right)"


def evaluate(
    model: Any,
    tokenizer: Any,
    rows: Rows,
    *,
    interface: str = "freeform",
    chat: bool = True,
    judge: str = "exact",
    max_new_tokens: int = 256,
) -> Evaluation:
    """Ask a model every row; free text is right by the judge, and also scored by its responses' loss."""
    bound = interfaces.build(interface, tokenizer, chat=chat)
    with evaluating(model):
        predictions, summary = evaluate_task(
            model, bound, read(rows), judge=chosen(judge), name="rows", max_new_tokens=max_new_tokens
        )
    return Evaluation(summary=summary, predictions=predictions)


def receipt(folder: str | Path) -> Receipt:
    """The receipt of a finished job, refused if it was altered."""
    return read_receipt(Path(folder))
