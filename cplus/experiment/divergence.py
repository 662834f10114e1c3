"""How far a model has moved from its base on the new rows: a known predictor of what it forgets.

KL(base || model) over the next token, at the targets of a few new rows, in nats per token. The base model's likeliest
tokens are kept apart and all others count as one, so that a reference is small; this can only make the divergence
smaller. Source: Shenfeld et al. 2025, RL's Razor: forgetting follows this divergence on the new task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from cplus import world
from cplus.data.batching import batched
from cplus.data.encoded import Encoded
from cplus.losses import target_logits

LIKELIEST = 64
"""Tokens of the base model that are compared one by one at each position."""
ROWS = 16
"""New rows on which the divergence is measured."""


@dataclass(frozen=True, kw_only=True)
class BaseRow:
    """A row with the base model's likeliest tokens at each target position and their log-probabilities."""

    row: Encoded
    tokens: Tensor
    logs: Tensor


@torch.no_grad()
def base_rows(model: nn.Module, rows: Sequence[Encoded]) -> list[BaseRow]:
    """What the base model expects at the targets of these rows."""
    found = []
    for batch in batched(rows):
        logits, labels = target_logits(model, batch)
        logs, tokens = logits.log_softmax(-1).topk(min(LIKELIEST, logits.shape[-1]), -1)
        for i, row in enumerate(batch):
            inside = labels[i] != -100
            found.append(BaseRow(row=row, tokens=tokens[i][inside].cpu(), logs=logs[i][inside].double().cpu()))
    return found


def divergence(model: nn.Module, rows: Sequence[BaseRow]) -> float:
    """The mean over all target tokens; the processes of a job compute a share of the rows each."""
    found = world.spread(rows, partial(_sums, model))
    return sum(total for total, _ in found) / sum(count for _, count in found)


@torch.no_grad()
def _sums(model: nn.Module, rows: Sequence[BaseRow]) -> list[tuple[float, int]]:
    """The summed divergence and the number of tokens of each row."""
    place = {id(own.row): i for i, own in enumerate(rows)}
    found: list[tuple[float, int]] = [(0.0, 0)] * len(rows)
    for batch in batched([own.row for own in rows]):
        logits, labels = target_logits(model, batch)
        for i, row in enumerate(batch):
            own = rows[place[id(row)]]
            logs = logits[i][labels[i] != -100].log_softmax(-1).cpu().double().gather(-1, own.tokens)
            found[place[id(row)]] = (float(_kl(own.logs, logs).sum()), len(own.tokens))
    return found


def _kl(base: Tensor, model: Tensor) -> Tensor:
    """KL at each position from the log-probabilities of some tokens, all others taken as one.

    >>> half = torch.tensor([0.5], dtype=torch.float64).log()
    >>> float(_kl(half, half)), round(float(_kl(half, half / 2)), 3)
    (0.0, 0.094)
    """
    kl = (base.exp() * (base - model)).sum(-1)
    rest, own = (1 - logs.exp().sum(-1) for logs in (base, model))
    smallest = torch.finfo(torch.float32).eps  # what rounding alone leaves
    rest, own = rest.clamp(min=smallest), own.clamp(min=smallest)
    return (kl + rest * (rest / own).log()).clamp(min=0.0)
