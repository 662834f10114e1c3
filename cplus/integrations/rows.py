"""Evidence from what a trainer's user already has: tokenised rows and a collator, or a sealed bank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cplus.core.rows import Encoded
from cplus.data.interfaces import Interface
from cplus.models.loading import fingerprint
from cplus.probes.bank import Bank

MASKS = ("assistant_masks", "completion_mask")  # the names used by chat templates and by TRL


def encoded(rows: Iterable[Mapping[str, Any]], collator: Callable[[list[Any]], Mapping[str, Any]]) -> list[Encoded]:
    """Tokenised rows as the trainer's own collator labels them: masked tokens are not scored.

    A row without labels but with a mask of the assistant's or the completion's tokens is labelled by that mask.
    """
    return [_encoded(collator([_labelled(row)])) for row in rows]


def _labelled(row: Mapping[str, Any]) -> dict[str, Any]:
    masks = [row[name] for name in MASKS if name in row]
    if "labels" in row or not masks:
        return dict(row)
    kept = [all(marks) for marks in zip(*masks, strict=True)]
    labels = [token if keep else -100 for token, keep in zip(row["input_ids"], kept, strict=True)]
    return {"input_ids": row["input_ids"], "labels": labels}


def _encoded(batch: Mapping[str, Any]) -> Encoded:
    if "input_ids" not in batch or "labels" not in batch:
        raise ValueError(f"expected input_ids and labels from the collator, got {', '.join(sorted(batch))}")
    ids, labels = torch.as_tensor(batch["input_ids"])[0].tolist(), torch.as_tensor(batch["labels"])[0].tolist()
    scored = [i for i, label in enumerate(labels) if label != -100 and i > 0]  # the first token is never predicted
    if not scored or any(labels[i] != ids[i] for i in scored):
        raise ValueError("expected labels that repeat some of the row's tokens and are -100 elsewhere")
    first, end = scored[0], scored[-1] + 1
    marks = tuple(label != -100 for label in labels[first:end])
    padding = torch.as_tensor(batch["attention_mask"])[0].tolist().index(1) if "attention_mask" in batch else 0
    return Encoded(tuple(ids[padding:first]), tuple(ids[first:end]), () if all(marks) else marks)


def bank_rows(folder: Path | str, model: nn.Module, interface: Interface) -> list[Encoded]:
    """The probes of a sealed bank as evidence; refuse a bank that was not sealed for this untrained model."""
    bank = Bank.load(folder, model_fingerprint=fingerprint(model))
    return [interface.encode(example) for example in bank.examples]
