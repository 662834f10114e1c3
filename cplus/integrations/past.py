"""Held-out past behaviour, measured at each of a trainer's evaluations: its loss and, for rows of tokens, Retention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from cplus.any_loss import LossFunction, LossSource
from cplus.data.batching import MAX_TOKENS, like_length
from cplus.data.encoded import Encoded
from cplus.evidence import evaluating
from cplus.files import read_json, write_json
from cplus.losses import target_logits

Past: TypeAlias = Sequence[Encoded] | tuple[Iterable[Any], LossFunction]
"""Rows of tokens, or batches of anything with their loss."""
FORMAT, FILE = "cplus-past/1", "cplus_past.json"
LOSS, RETENTION = "cplus/past_loss", "cplus/retention"


class HeldOut:
    """Held-out past rows or batches, and which rows the model answered correctly before training."""

    def __init__(self, past: Past) -> None:
        self.rows: Sequence[Encoded] = ()
        self.batches: LossSource | None = None
        if isinstance(past, tuple) and len(past) == 2 and callable(past[1]):
            self.batches = LossSource(name="past", weight=1.0, batches=past[0], loss=past[1])
        else:
            self.rows = list(past)
            if not self.rows or not all(isinstance(row, Encoded) for row in self.rows):
                raise TypeError(
                    "past must be rows of tokens, such as cplus.encode gives, or a pair (batches, loss function), got "
                    + (type(self.rows[0]).__name__ if self.rows else "no row")
                )
        self.right: list[bool] = []

    def begin(self, model: nn.Module) -> None:
        """Note which rows are answered correctly before training."""
        self.right = measured(model, self.rows)[1] if self.rows else []

    def figures(self, model: nn.Module) -> dict[str, float]:
        """The mean loss and the share of the rows answered correctly at first that still are; without such rows, none.

        A row of tokens is answered correctly if each scored token is the most likely one.
        """
        if self.batches is not None:
            return {LOSS: mean_loss(model, self.batches)}
        losses, right = measured(model, self.rows)
        found = {LOSS: sum(losses) / len(losses)}
        if any(self.right):
            kept = sum(now for now, before in zip(right, self.right, strict=True) if before)
            found[RETENTION] = kept / sum(self.right)
        return found

    def save(self, folder: Path) -> None:
        """Write the answers before training into a checkpoint, so that a resumed run compares with them."""
        write_json(folder / FILE, {"format": FORMAT, "right": self.right})

    def load(self, folder: Path) -> None:
        """Restore the answers before training; refuse those of other rows."""
        about = read_json(folder / FILE) if (folder / FILE).is_file() else {}
        right = about.get("right") if isinstance(about, dict) and about.get("format") == FORMAT else None
        if not isinstance(right, list) or len(right) != len(self.rows):
            raise ValueError(
                f"expected the answers to {len(self.rows)} past rows before training in {folder / FILE}, found "
                f"{'none' if right is None else len(right)}; resume with the past rows that the run was started with"
            )
        self.right = right


@torch.no_grad()
def measured(model: nn.Module, rows: Sequence[Encoded]) -> tuple[list[float], list[bool]]:
    """Each row's loss and whether it is answered correctly, in evaluation mode."""
    losses, right = [0.0] * len(rows), [False] * len(rows)
    with evaluating(model):
        for batch in like_length(rows, MAX_TOKENS):
            logits, labels = target_logits(model, [rows[i] for i in batch])
            inside = labels != -100
            token = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
            means = token.view_as(labels).sum(1) / inside.sum(1)
            hits = ((logits.argmax(-1) == labels) | ~inside).all(1)
            for i, loss, hit in zip(batch, means.tolist(), hits.tolist(), strict=True):
                losses[i], right[i] = loss, hit
    return losses, right


@torch.no_grad()
def mean_loss(model: nn.Module, source: LossSource) -> float:
    """The mean loss over the batches, in evaluation mode."""
    with evaluating(model), torch.random.fork_rng():
        losses = [float(source.loss(model, batch)) for batch in source.batches]
    if not losses:
        raise ValueError("past has no batch; give a list or a DataLoader that can be read at each evaluation")
    return sum(losses) / len(losses)
