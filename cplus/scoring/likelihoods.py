"""Log-likelihoods of answers: each prompt is processed once for all its candidates, with logits at answers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cplus.data.encoded import Encoded, shared_prefix
from cplus.losses import target_logits
from cplus.scoring.batches import bare, check_window, scored
from cplus.scoring.packed import PackedRow, packed_scores, read_prefix, takes_block_masks

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Score:
    """One answer's log-likelihood: the sum over its tokens, and their number."""

    total: float
    num_tokens: int

    @property
    def mean(self) -> float:
        """The mean token log-likelihood, which allows comparing answers of different lengths."""
        return self.total / self.num_tokens


@torch.inference_mode()
def score_candidates(
    model: nn.Module, prompts: Sequence[Tokens], candidates: Sequence[Sequence[Tokens]], *, what: str = "scoring"
) -> list[tuple[Score, ...]]:
    """The scores of every candidate after its prompt."""
    rows = [PackedRow(tuple(p), tuple(map(tuple, own))) for p, own in zip(prompts, candidates, strict=True)]
    check_window(model, [len(row.prompt) + max(map(len, row.candidates)) - 1 for row in rows])
    if not takes_block_masks(bare(model), max(map(len, rows), default=0)):
        return _scores_separately(model, rows, what)
    prefix = shared_prefix(prompts)
    rows = [PackedRow(row.prompt[len(prefix) :], row.candidates) for row in rows]
    past = read_prefix(bare(model), prefix)
    scores: list[tuple[Score, ...]] = [()] * len(rows)
    for batch in scored(model, [len(row) for row in rows], [row.kept for row in rows], what):
        totals = packed_scores(bare(model), [rows[i] for i in batch], len(prefix), past)
        for index, own in zip(batch, totals, strict=True):
            lengths = map(len, rows[index].candidates)
            scores[index] = tuple(Score(total, length) for total, length in zip(own, lengths, strict=True))
    return scores


@dataclass(frozen=True, slots=True)
class Reading:
    """A target after its prompt: its score, and whether each of its tokens is the most likely one at its position."""

    score: Score
    likeliest: bool


def log_likelihoods(model: nn.Module, rows: Sequence[Encoded], *, what: str = "scoring") -> list[Score]:
    """The score of each row's target."""
    return [reading.score for reading in read_targets(model, rows, what=what)]


@torch.inference_mode()
def read_targets(model: nn.Module, rows: Sequence[Encoded], *, what: str = "scoring") -> list[Reading]:
    """Each row's target in one pass; if every token is the most likely one, greedy decoding gives this target."""
    check_window(model, [len(row) - 1 for row in rows])
    readings = [Reading(Score(0.0, 1), False)] * len(rows)
    for batch in scored(model, [len(row) for row in rows], [len(row.target) for row in rows], what):
        logits, labels = target_logits(bare(model), [rows[i] for i in batch])
        tokens = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0] - logits.logsumexp(2)
        totals = tokens.masked_fill(labels < 0, 0.0).sum(1).tolist()
        likeliest = ((logits.argmax(2) == labels) | (labels < 0)).all(1).tolist()
        for index, total, repeats in zip(batch, totals, likeliest, strict=True):
            readings[index] = Reading(Score(total, rows[index].num_scored), repeats)
    return readings


def _scores_separately(model: nn.Module, rows: Sequence[PackedRow], what: str) -> list[tuple[Score, ...]]:
    """Every candidate as a separate row, for attention that accepts no custom mask."""
    separate = [Encoded(row.prompt, candidate) for row in rows for candidate in row.candidates]
    scores = iter(log_likelihoods(model, separate, what=what))
    return [tuple(next(scores) for _ in row.candidates) for row in rows]
