"""Seconds of a repair, estimated from a few timed rows on the real model."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cplus import models
from cplus.data.encoded import Encoded
from cplus.job.settings import AdaptConfig
from cplus.job.timing import Range
from cplus.models import Loaded
from cplus.repairing.importance import Sums, add_gradients
from cplus.repairing.model import By
from cplus.repairing.share import TRIALS
from cplus.scoring import log_likelihoods

_ROWS = 3
FEWEST = 2
"""Trials of free text, whose loss tells where to look next, in a good case."""


def repair_seconds(
    config: AdaptConfig,
    base: Loaded,
    new: Sequence[Encoded],
    past: Range,
    *,
    trial: Range,
    by: By,
    rounds: int = 1,
    max_rows: int,
) -> Range:
    """Gradients and a search; `past` counts the tokens of past rows, `trial` times one trial.

    Importance takes a gradient of each past row and, in each round, of each new row; blame one of each past row.
    """
    used = new[:max_rows]
    tokens = sum(map(len, used))
    backward, forward = _paces(config, base, used)
    low, high = (
        (rounds * past.low, rounds * past.high)
        if by == "blame"
        else (past.low + rounds * tokens, past.high + rounds * tokens)
    )
    importance = Range(backward.low * low, backward.high * high)
    passes, fewest = rounds + 2, FEWEST if by == "blame" else TRIALS
    return Range(
        importance.low + passes * forward.low * past.low + (fewest * rounds + 2) * trial.low,
        importance.high + passes * forward.high * past.high + (TRIALS * rounds + 2) * trial.high,
    )


def _paces(config: AdaptConfig, base: Loaded, rows: Sequence[Encoded]) -> tuple[Range, Range]:
    """Seconds per token of a row's squared gradient, and of its loss alone; the first pass is slower and left out."""
    params = list(base.model.parameters())
    sums, marks = Sums.zeros(params), [time.perf_counter()]
    add_gradients(
        base.model,
        (list(rows) * (_ROWS + 1))[: _ROWS + 1],
        params,
        sums,
        computing=lambda: models.computing(config.compute_dtype, base.device),
        after=lambda _: marks.append(time.perf_counter()),
    )
    timed = (list(rows) * (_ROWS + 1))[1 : _ROWS + 1]
    paces = [(b - a) / len(row) for a, b, row in zip(marks[1:], marks[2:], timed, strict=False)]
    begun = time.perf_counter()
    with models.computing(config.compute_dtype, base.device):
        log_likelihoods(base.model, timed, what="timing")
    forward = (time.perf_counter() - begun) / sum(map(len, timed))
    return Range(min(paces), max(paces)), Range(forward, forward)
