"""Settings that choose themselves, each with its reason, and the range test of `--lr auto`."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import nn

from cplus import models
from cplus.base import files
from cplus.core.rows import Encoded, batched, measured
from cplus.data.examples import Choice as MultipleChoice
from cplus.distributed import processes as world
from cplus.jobs.memory import CHECKPOINTED, Footprint, ModelSize, giga
from cplus.jobs.rows import Tasks
from cplus.jobs.settings import AdaptConfig
from cplus.methods.table import METHODS, Material, Method, Past
from cplus.models import loading
from cplus.models.scoring import log_likelihoods
from cplus.training.driver import adapted, start
from cplus.training.loop import Schedule, epoch_batches, updates_per_epoch
from cplus.training.measure import Exploded, loss_of
from cplus.training.settings import AUTO

RATE, SIZE = 3e-5, 135e6
"""The rate that was found on a model of this size; others get it times the root of the ratio of the sizes."""
LOWEST, HIGHEST = 1e-6, 1e-3
ADAPTERS = 10
"""Adapters are trained at this many times the rate of all weights."""
UPDATES, FEWEST_EPOCHS, EVALUATIONS = 60, 3, 6
"""Free text: the epochs of at least this many updates, and never fewer epochs; about this many evaluations."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A setting that was not given, its value and why it has this value."""

    name: str
    value: float | int | str | bool
    why: str

    @property
    def named(self) -> str:
        """The setting and its value."""
        return f"{self.name} {f'{self.value:g}' if isinstance(self.value, float) else self.value}"

    def __str__(self) -> str:
        return f"{self.named}: {self.why}"


def rate_by_size(parameters: int, *, adapters: bool = False) -> float:
    """AdamW's learning rate for a model of this size, to one digit.

    >>> rate_by_size(134_515_008), rate_by_size(4_022_468_096), rate_by_size(602_000, adapters=True)
    (3e-05, 5e-06, 0.004)
    """
    rate = min(HIGHEST, max(LOWEST, RATE * math.sqrt(SIZE / max(1, parameters))))
    return float(f"{rate * (ADAPTERS if adapters else 1):.0e}")


def default_rate(config: AdaptConfig, parameters: int) -> Chosen:
    """The learning rate of a job that names none."""
    if config.optimizer != "adamw":
        raise ValueError(f"the default learning rate is AdamW's, but the optimizer is {config.optimizer}; provide lr")
    adapters = config.lora is not None
    why = f"by the size of the model, {_size(parameters)}: {RATE:g} at {_size(int(SIZE))}, by the root of the ratio"
    why += f", and {ADAPTERS} times that for adapters" * adapters
    return Chosen(name="lr", value=rate_by_size(parameters, adapters=adapters), why=why)


def _size(parameters: int) -> str:
    """A number of parameters in words.

    >>> _size(134_515_008), _size(601_536), _size(4_022_468_096)
    ('135 M', '0.602 M', '4.02 B')
    """
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"


def epochs_by_rows(num_new: int, batch_size: int, most: int) -> int:
    """Epochs of free text at most: many for a small file, few for a large one.

    >>> [epochs_by_rows(count, 8, 25) for count in (8, 40, 96, 1000)]
    [25, 12, 5, 3]
    """
    wanted = math.ceil(UPDATES / updates_per_epoch(num_new, batch_size))
    return max(FEWEST_EPOCHS, min(most, wanted))


def choose(
    config: AdaptConfig, tasks: Tasks, size: ModelSize, need: Footprint
) -> tuple[AdaptConfig, tuple[Chosen, ...]]:
    """The settings with everything chosen that was not given; a rate that is to be tested stays open."""
    given, found = config.model_fields_set, []
    if config.lr is None:
        found.append(default_rate(config, size.parameters))
    rows = () if tasks.new is None else tasks.new.examples
    free = bool(rows) and not isinstance(rows[0], MultipleChoice)
    if free and "epochs" not in given and config.stop != "never":
        count = len(rows)
        epochs = epochs_by_rows(count, config.batch_size, config.epochs)
        updates = epochs * updates_per_epoch(count, config.batch_size)
        why = f"{updates} updates of {config.batch_size} of the {count} new rows at most, fewer if all is learned"
        found.append(Chosen(name="epochs", value=epochs, why=why))
        every = max(1, round(epochs / EVALUATIONS))
        if "evaluate_every" not in given and every > 1 and config.lost_limit is None and not config.keep_best:
            why = f"about {EVALUATIONS} evaluations while training"
            found.append(Chosen(name="evaluate_every", value=every, why=why))
    processes, device = world.started()[1], models.choose_device(config.device)
    if "compute_dtype" not in given and device.type == "cuda" and torch.cuda.is_bf16_supported():
        why = "the device computes in it; weights, optimizer and gate stay float32"
        found.append(Chosen(name="compute_dtype", value="bfloat16", why=why))
    light = need.peak - size.activation_bytes + size.activation_bytes // CHECKPOINTED
    # Free memory differs between processes, their settings must not.
    if "gradient_checkpointing" not in given and processes == 1 and light <= need.available < need.peak:
        why = (
            f"{giga(need.peak)} GB would be needed at the peak, {giga(need.available)} GB are free; activations "
            f"computed twice need about {giga(light)} GB"
        )
        found.append(Chosen(name="gradient_checkpointing", value=True, why=why))
    return with_chosen(config, found), tuple(found)


def with_chosen(config: AdaptConfig, found: Iterable[Chosen]) -> AdaptConfig:
    """The settings with these values."""
    return config.model_copy(update={own.name: own.value for own in found})


def stored(settings: Path) -> tuple[Chosen, ...]:
    """The choices that a job's file of settings holds beside the values: a resumed job was given everything."""
    return tuple(Chosen(**row) for row in files.read_json(settings).get("chosen", ()))


def is_open(config: AdaptConfig) -> bool:
    """Whether the learning rate is still to be tested."""
    return config.lr == AUTO


# The tokens of a job's epochs, counted as they will be batched, before the bank is written.


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Padded tokens per epoch: of plain fine-tuning, of the method's training, of its evidence."""

    sft: int
    training: int
    evidence: int

    @property
    def percent(self) -> float:
        """What the method costs above plain fine-tuning.

        Paper: App. E.12: FLOPs are 6 P L, so that P cancels out.

        >>> Tokens(sft=100, training=100, evidence=25).percent
        25.0
        """
        return 100 * (self.training + self.evidence) / self.sft - 100


def tokens_per_epoch(config: AdaptConfig, method: Method, material: Material) -> Tokens:
    """Count the tokens of the first epoch as they will be batched."""
    schedule = Schedule(epochs=1, batch_size=config.batch_size, order=config.order)

    def trained(row: Method) -> int:
        return sum(padded(batch) for batch in epoch_batches(row, material, schedule, seed=config.seed, epoch=1))

    updates = updates_per_epoch(len(material.new), config.batch_size)
    training = trained(method)
    training += round(updates * padded(material.rows("anchors")) * method.objective.anchor_passes)
    training += round(sum(padded(material.rows(kind)) for kind in method.objective.read_by_base) / 3)
    # Evidence computed once is preparation, which the paper leaves out of the cost of training.
    refreshes = updates / method.refresh if isinstance(method.refresh, int) else float(method.refresh == "epoch")
    evidence = round(refreshes * evidence_tokens(method, material))
    return Tokens(sft=trained(METHODS["sft"]), training=training, evidence=evidence)


def evidence_tokens(method: Method, material: Material) -> int:
    """The tokens of one refresh."""
    return sum(padded(source.at(0)) for source in method.sources(material)) if method.evidence else 0


def padded(rows: Sequence[Encoded]) -> int:
    """The tokens of rows in batches of similar length."""
    return sum(measured(batch).padded for batch in batched(rows))


# The range test of `--lr auto`: a ladder of rates, a few updates each from the same weights, on the job's rows.
#
# Each rate is tried at ten times its size, because a few updates stand for the many of the job; so the usual rule, a
# tenth of the rate at which the loss is lowest, is applied to what new rows gain less what kept rows lose.


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


def range_test(config: AdaptConfig, row: Method, model: nn.Module, rows: Material, held: Sequence[Encoded]) -> Chosen:
    """Try a ladder of rates around the default one; the model's weights are the same afterwards.

    What kept rows lose is measured on anchors and probes that the test's gate does not use, else on `held`.
    """
    tried = adapted(config, row, model)  # as it will train; adapters are removed again afterwards
    try:
        return _tested(config, row, tried, rows, held)
    finally:
        if tried is not model:
            tried.unload()
        model.eval()


def _tested(config: AdaptConfig, row: Method, model: nn.Module, rows: Material, held: Sequence[Encoded]) -> Chosen:
    rule = default_rate(config, loading.num_weights(model))
    assert isinstance(rule.value, float)
    draw = random.Random(config.seed)
    few, kept = _few(rows, held, draw)
    new = draw.sample(list(rows.new), min(MEASURED, len(rows.new)))
    size = _affordable(config, row, rows, few, [*new, *kept])
    if size is None:
        why = f"the job is too short for a test that costs a tenth of it, so by model size: {rule.why}"
        return replace(rule, why=why)
    rungs, updates = size
    device = next(model.parameters()).device
    with models.computing(config.compute_dtype, device):
        start_new, start_kept = _loss(model, new), _loss(model, kept)
    shuffled = draw.sample(list(rows.new), len(rows.new))
    few = replace(few, new=list(islice(cycle(shuffled), updates * config.batch_size)))
    found = []
    for factor in FACTORS[rungs]:
        lr = float(f"{factor * rule.value:.0e}")
        after = _trained(config, row, model, few, lr, new, kept)
        found.append(Rung(lr=lr, gained=start_new - after[0], lost=after[1] - start_kept))
    return best_rung(found, updates)


def best_rung(rungs: Sequence[Rung], updates: int) -> Chosen:
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
        past.append(Past(name=task.name, anchors=anchors[:EVIDENCE], probes=used, synthetic=used))
        rest += [*anchors[EVIDENCE:], *probes[EVIDENCE:]]
    kept = rest or list(held) or [row for task in rows.past for row in (*task.anchors, *task.probes)]
    return replace(rows, past=tuple(past)), draw.sample(kept, min(MEASURED, len(kept)))


def _affordable(
    config: AdaptConfig, row: Method, rows: Material, few: Material, measured: Sequence[Encoded]
) -> tuple[int, int] | None:
    """The rungs and updates of the best test that costs a tenth of the job; a forward pass is a third of an update."""
    whole = tokens_per_epoch(config, row, rows)
    budget = SHARE * config.epochs * (whole.training + whole.evidence)
    update = padded(rows.new) / len(rows.new) * config.batch_size
    for rungs, updates in TRIALS:
        cost = rungs * (updates * update + evidence_tokens(row, few)) + (rungs + 1) * padded(measured) / 3
        if cost <= budget:
            return rungs, updates
    return None


def _trained(
    config: AdaptConfig,
    row: Method,
    model: nn.Module,
    rows: Material,
    lr: float,
    new: Sequence[Encoded],
    kept: Sequence[Encoded],
) -> tuple[float, float]:
    """The losses of new and kept rows after one pass over the rows at ten times the rate; the weights are restored."""
    fixed = {"epochs": 1, "order": "file", "warmup_steps": 0, "lr_schedule": "constant"}
    training = start(config.model_copy(update={"lr": TENFOLD * lr, **fixed}), row, model, rows)
    weights = {name: value.clone() for name, value in training.weights().items()}
    try:
        for _ in training.run():
            pass
        model.eval()
        with models.computing(config.compute_dtype, next(model.parameters()).device):
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
