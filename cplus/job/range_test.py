"""The range test of `--lr auto`: a ladder of rates, a few updates each from the same weights, on the job's rows.

Each rate is tried at ten times its size, because a few updates stand for the many of the job; so the usual rule, a
tenth of the rate at which the loss is lowest, is applied to what new rows gain less what kept rows lose.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from torch import nn

from cplus import models
from cplus.data.encoded import Encoded
from cplus.experiment.driver import adapted, start
from cplus.experiment.material import past_rows
from cplus.experiment.measure import loss_of
from cplus.experiment.precision import in_precision
from cplus.experiment.settings import Settings
from cplus.health import Exploded
from cplus.job.choices import Chosen, default_rate
from cplus.job.settings import AdaptConfig
from cplus.job.workload import evidence_tokens, padded, tokens_per_epoch
from cplus.methods import Material, Method
from cplus.models import four_bit
from cplus.scoring import log_likelihoods

TENFOLD = 10
"""A rate is tried at this many times its size."""
FACTORS = {5: (0.1, 0.3, 1.0, 3.0, 10.0), 3: (0.3, 1.0, 3.0)}
"""The ladder around the rate by model size, by its number of rungs."""
TRIALS = ((5, 4), (5, 3), (5, 2), (3, 3), (3, 2))
"""Rungs and updates per rung, the best test first."""
SHARE = 0.1
"""A test costs at most this share of the job's tokens, all epochs counted."""
EVIDENCE, MEASURED = 4, 12
"""Anchors, and probes, that the test's gate uses, and rows of each kind whose loss is measured."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One rate of the ladder: what new rows gained and kept rows lost in the test, in nats per token."""

    lr: float
    gained: float
    lost: float

    @property
    def score(self) -> float:
        """Gain less loss; kept rows that got better count nothing."""
        return self.gained - max(0.0, self.lost)

    def __str__(self) -> str:
        if not math.isfinite(self.score):
            return f"{self.lr:g} diverges"
        return f"{self.lr:g} gains {self.gained:.3f} on new rows and loses {self.lost:.3f} on kept ones"


@dataclass(frozen=True, kw_only=True)
class RangeTest:
    """The rungs that were tried, and the rate that was chosen."""

    rungs: tuple[Rung, ...]
    chosen: Chosen


@contextmanager
def adapted_for_a_test(settings: Settings, row: Method, model: nn.Module) -> Iterator[Any]:
    """The model as it will train; adapters are removed again afterwards."""
    tried = adapted(settings, row, model)
    try:
        yield tried
    finally:
        if tried is not model:
            tried.unload()
        model.eval()


def range_test(
    config: AdaptConfig, settings: Settings, row: Method, model: nn.Module, rows: Material, held: Sequence[Encoded]
) -> RangeTest:
    """Try a ladder of rates around the default one; the model's weights are the same afterwards.

    What kept rows lose is measured on anchors and probes that the test's gate does not use, else on `held`.
    """
    rule = default_rate(config, four_bit.num_weights(model))
    assert isinstance(rule.value, float)
    draw = random.Random(config.seed)
    few, kept = _few(rows, held, draw)
    new = draw.sample(list(rows.new), min(MEASURED, len(rows.new)))
    size = _size(config, settings, row, rows, few, [*new, *kept])
    if size is None:
        why = f"the job is too short for a test that costs a tenth of it, so by model size: {rule.why}"
        return RangeTest(rungs=(), chosen=replace(rule, why=why))
    rungs, updates = size
    device = next(model.parameters()).device
    with models.computing(settings.compute_dtype, device):
        start_new, start_kept = _loss(model, new), _loss(model, kept)
    found = []
    tried = replace(
        few, new=list(islice(cycle(draw.sample(list(rows.new), len(rows.new))), updates * config.batch_size))
    )
    for factor in FACTORS[rungs]:
        lr = float(f"{factor * rule.value:.0e}")
        after = _trained(settings, in_precision(row, settings.compute_dtype, device), model, tried, lr, new, kept)
        found.append(Rung(lr=lr, gained=start_new - after[0], lost=after[1] - start_kept))
    return RangeTest(rungs=tuple(found), chosen=_best(found, updates))


def _best(rungs: Sequence[Rung], updates: int) -> Chosen:
    """The rate with the best score, the lower one of two equal ones."""
    best = max(rungs, key=lambda rung: (rung.score, -rung.lr))
    tried = "; ".join(map(str, rungs))
    why = f"best of a short test, {updates} updates at {TENFOLD} times each rate: of nats per token, {tried}"
    if best in (rungs[0], rungs[-1]):
        why += f"; the {'lowest' if best is rungs[0] else 'highest'} rate that was tried"
    return Chosen(name="lr", value=best.lr, why=why)


def _few(rows: Material, held: Sequence[Encoded], draw: random.Random) -> tuple[Material, list[Encoded]]:
    """The first past task with a few anchors and probes for the gate, and kept rows to measure on."""
    past, rest = [], []
    for task in rows.past[:1]:
        anchors, probes = (draw.sample(list(own), len(own)) for own in (task.anchors, task.probes))
        used = probes[:EVIDENCE]
        past.append(past_rows(task.name, anchors=anchors[:EVIDENCE], probes=used, synthetic=used))
        rest += [*anchors[EVIDENCE:], *probes[EVIDENCE:]]
    kept = rest or list(held) or [row for task in rows.past for row in (*task.anchors, *task.probes)]
    return replace(rows, past=tuple(past)), draw.sample(kept, min(MEASURED, len(kept)))


def _size(
    config: AdaptConfig,
    settings: Settings,
    row: Method,
    rows: Material,
    few: Material,
    measured: Sequence[Encoded],
) -> tuple[int, int] | None:
    """The rungs and updates of the best test that costs a tenth of the job; a forward pass is a third of an update."""
    whole = tokens_per_epoch(config, row, rows)
    budget = SHARE * settings.epochs * (whole.training + whole.evidence)
    update = padded(rows.new) / len(rows.new) * config.batch_size
    for rungs, updates in TRIALS:
        cost = rungs * (updates * update + evidence_tokens(row, few)) + (rungs + 1) * padded(measured) / 3
        if cost <= budget:
            return rungs, updates
    return None


def _trained(
    settings: Settings,
    row: Method,
    model: nn.Module,
    rows: Material,
    lr: float,
    new: Sequence[Encoded],
    kept: Sequence[Encoded],
) -> tuple[float, float]:
    """The losses of new and kept rows after one pass over the rows at ten times the rate; the weights are restored."""
    short = replace(
        settings, lr=TENFOLD * lr, epochs=1, order="file", warmup_steps=0, warmup_share=0.0, lr_schedule="constant"
    )
    training = start(short, row, model, rows)
    weights = {name: value.clone() for name, value in training.weights().items()}
    try:
        for _ in training.run():
            pass
        model.eval()
        with models.computing(settings.compute_dtype, next(model.parameters()).device):
            return _loss(model, new), _loss(model, kept)
    except (FloatingPointError, Exploded):
        return math.inf, math.inf
    finally:
        if training.prepared.guard is not None:
            training.prepared.guard.detach()
        training.optimizer.zero_grad(set_to_none=True)
        training.restore(weights)
        model.eval()


def _loss(model: nn.Module, rows: Sequence[Encoded]) -> float:
    """The mean loss per token; 0 where there are no rows."""
    return loss_of(log_likelihoods(model, rows, what="testing rates")) if rows else 0.0
