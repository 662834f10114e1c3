"""From a study's spec to its result: train a copy of the base model by one method and measure it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from cplus import selection
from cplus.adapters import merged
from cplus.cost import cost_row
from cplus.data.examples import Example
from cplus.data.predictions import Prediction
from cplus.data.split import Split, draw_anchors
from cplus.diagnostics import AUDITED, OBSERVED, Observation
from cplus.diagnostics.mask_audit import BUDGETS, Evidences, audit
from cplus.evaluation import Flip, acquisition, correction, flips, percent, retention, without
from cplus.evaluation.letters import permuted
from cplus.evaluation.prior import answer_prior
from cplus.evaluation.statistics import token_loss
from cplus.experiment.comparison import Outside, Setting, material
from cplus.experiment.driver import Training, TrainingSettings, begin, build_optimizer, updates_an_epoch
from cplus.experiment.record import RunResult, RunSpec, environment
from cplus.experiment.task_split import answers
from cplus.loop import EpochEnded, Event, Prepared, Schedule, epoch_batches
from cplus.methods import METHODS, Material, Method
from cplus.scoring import predict

Watch = Callable[[Event], None]
DIAGNOSTICS = (*OBSERVED, *AUDITED, "prior", "permuted")
"""The names that `RunSpec.diagnose` may hold."""


def configured(spec: RunSpec) -> Method:
    """The spec's row of the table with what the spec says about its evidence and smoothing beyond the defaults."""
    return selection.configured(selection.method(spec.method), **spec.method_settings)


def training_settings(spec: RunSpec, num_new: int) -> TrainingSettings:
    """How the spec trains; its warm-up is a share of all updates."""
    total = spec.epochs * updates_an_epoch(num_new, spec.batch_size)
    return TrainingSettings(
        seed=spec.seed,
        epochs=spec.epochs,
        lr=spec.lr,
        batch_size=spec.batch_size,
        order=cast(Literal["file", "shuffled"], spec.order),
        optimizer=cast(Literal["adamw", "sgd"], spec.optimizer),
        weight_decay=spec.weight_decay,
        warmup=round(spec.warmup * total),
    )


def begun(spec: RunSpec, given: Setting) -> Training:
    """A copy of the base model, ready for its first update by the spec's method."""
    row = configured(spec)
    model = row.trained(copy.deepcopy(given.base.model), spec.seed)
    return begin(training_settings(spec, len(given.new)), row, model, material(row, given))


def run(spec: RunSpec, given: Setting, *, watch: Watch = lambda event: None) -> RunResult:
    """Adapt a copy of the base model by the spec's method and measure what was learned and lost."""
    training = begun(spec, given)
    model, prepared, ledger = training.model, training.prepared, training.ledger
    parameters = sum(p.numel() for p in model.parameters())
    audited = _audited(spec, given, prepared.material, model)
    observation = _observation(spec, given, prepared, training.settings.schedule)
    curve = _start(spec, given)
    for event in training.run():
        if isinstance(event, EpochEnded) and spec.evaluate_every and event.epoch % spec.evaluate_every == 0:
            curve.append({"epoch": float(event.epoch), **measure(given, model)})
            model.train()
        observation(event)
        watch(event)
    if prepared.guard is not None:
        prepared.guard.detach()
    model = merged(model).eval()
    seen = bool(curve) and curve[-1]["epoch"] == spec.epochs and prepared.method.adapter is None
    figures = {k: v for k, v in curve[-1].items() if k != "epoch"} if seen else measure(given, model)
    return RunResult(
        spec=spec,
        **figures,
        correction=_correction(given, model),
        diagnostics={**audited, **observation.report(), **_after_training(spec, given, model)},
        external={name: _after(model, outside) for name, outside in given.outside.items()},
        counts={"parameters": parameters, **_counts(given)},
        cost=cost_row(parameters, training=ledger.training, preservation=ledger.preservation),
        seconds=ledger.seconds - observation.seconds,
        extra_bytes=ledger.extra_bytes,
        curve=curve,
        environment=environment(threads=torch.get_num_threads(), device=str(given.base.device)),
    )


def _counts(given: Setting) -> dict[str, int]:
    return {
        "past": len(given.split.past),
        "asked": len(given.asked),
        "wrong": len(given.wrong),
        "new": len(given.new),
        "anchors": len(given.anchors),
        "probes": len(given.probes),
        "overlap": len(given.covered),
    }


def measure(given: Setting, model: nn.Module) -> dict[str, float]:
    """Retention over the past rows, the same without those the bank covers, and Acquisition over the new rows.

    Paper: Sec. 4.1, Evaluation. Anchors of another task are left out of Retention, as in App. E.4.
    """
    model.eval()
    past = answers(model, given.interface, given.asked)
    return _figures(given, past, answers(model, given.learned_by, given.new))


def _figures(given: Setting, past: Sequence[Prediction], new: Sequence[Prediction]) -> dict[str, float]:
    """What these answers are worth; of free text also the losses of the responses."""
    anchors = {example.id for example in given.anchors} if given.crossed else set()
    kept = without(_changes(given.split, past), anchors)
    found = {
        "retention": retention(kept).percent,
        "retention_uncovered": retention(without(kept, given.covered)).percent,
        "acquisition": acquisition(_changes(given.learned, new)).percent,
    }
    if given.interface.name == "freeform":
        found["past_nll"] = _loss([answer for answer in past if answer.id not in anchors])
        found["new_nll"] = _loss(new)
    return found


def _loss(answers: Sequence[Prediction]) -> float:
    pairs = [pair for answer in answers for pair in zip(answer.scores, answer.num_tokens, strict=True)]
    return token_loss((score * count, count) for score, count in pairs)


def _start(spec: RunSpec, given: Setting) -> list[dict[str, float]]:
    """The curve's first look, at the base model: of free text, whose losses do not begin at a known value."""
    if not spec.evaluate_every or given.interface.name != "freeform":
        return []
    past, new = _before(given.split, given.asked), _before(given.learned, given.new)
    return [{"epoch": 0.0, **_figures(given, past, new)}]


def _before(parted: Split, rows: Sequence[Example]) -> list[Prediction]:
    """The base model's answers to these rows."""
    ids = {example.id for example in rows}
    return [prediction for prediction in parted.predictions if prediction.id in ids]


def _changes(parted: Split, after: Sequence[Prediction]) -> list[Flip]:
    ids = {prediction.id for prediction in after}
    return flips([prediction for prediction in parted.predictions if prediction.id in ids], after)


def _correction(given: Setting, model: nn.Module) -> float | None:
    """The share of the past task's wrong rows that came right, anchors left out."""
    if not given.wrong:
        return None
    table = _changes(given.split, answers(model, given.interface, given.wrong))
    return correction(table, {example.id for example in given.anchors}).percent


def _observation(spec: RunSpec, given: Setting, prepared: Prepared, schedule: Schedule) -> Observation:
    """The taps the spec names; their full-data reference takes every past row as an anchor."""
    if unknown := [name for name in spec.diagnose if name not in DIAGNOSTICS]:
        raise ValueError(f"unknown diagnostic {unknown[0]!r}; expected some of {', '.join(DIAGNOSTICS)}")
    names = [name for name in spec.diagnose if name in OBSERVED]
    full = prepared.material
    if names:
        rows = [given.interface.encode(example) for example in given.split.past]
        past = tuple(dataclasses.replace(each, anchors=rows) for each in full.past)
        full = dataclasses.replace(full, past=past)
    return Observation(names, prepared, full=full, schedule=schedule, seed=spec.seed)


def _audited(spec: RunSpec, given: Setting, rows: Material, model: nn.Module) -> dict[str, Any]:
    """The mask audit at the base model's weights, over one epoch of plain fine-tuning's updates."""
    if "audit" not in spec.diagnose:
        return {}
    past, encoded = given.split.past, given.interface.encode
    counts = [count for count in sorted({*BUDGETS, spec.num_anchors}) if 0 < count <= len(past)]
    evidences = Evidences(
        anchors={count: [encoded(e) for e in draw_anchors(given.split, count, spec.seed)] for count in counts},
        num_anchors=spec.num_anchors,
        probes=rows.rows("probes"),
        past=[encoded(example) for example in past],
        anchor_weight=spec.anchor_weight,
    )
    once = Schedule(epochs=1, batch_size=spec.batch_size, order=cast(Literal["file", "shuffled"], spec.order))
    batches = epoch_batches(METHODS["sft"], rows, once, seed=spec.seed, epoch=1)
    optimizer = build_optimizer(training_settings(spec, len(given.new)), model)
    return {"audit": audit(model, optimizer, batches, evidences, beta=spec.beta)}


def _after_training(spec: RunSpec, given: Setting, model: nn.Module) -> dict[str, Any]:
    """The diagnostics that need the trained model alone: `prior` and `permuted`."""
    found: dict[str, Any] = {}
    if "prior" in spec.diagnose:
        before = _before(given.split, given.asked)
        after = predict(model, given.interface, given.asked)
        found["prior"] = answer_prior(before, after, given.asked, by_letter=given.interface.name == "letter")
    if "permuted" in spec.diagnose:
        if given.interface.name != "letter":
            raise ValueError(f"options stand in an order only for the letter interface, not for {spec.interface}")
        found["permuted"] = permuted(lambda rows: predict(model, given.interface, rows), given.asked).row()
    return found


def _after(model: nn.Module, outside: Outside) -> dict[str, float]:
    after = predict(model, outside.interface, outside.examples)
    table = flips(outside.before, after)
    return {"before": percent(outside.before), "after": percent(after), "kept": retention(table).percent}
