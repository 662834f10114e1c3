"""From a study's spec to its result: train a copy of the base model by one method and measure it."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from cplus import selection
from cplus.adapters import merged
from cplus.cost import Work
from cplus.data.examples import Example
from cplus.data.split import Split, draw_anchors
from cplus.diagnostics import AUDITED, OBSERVED, Observation
from cplus.diagnostics.audit import BUDGETS, Evidences, audit
from cplus.evaluate import Flip, acquisition, correction, flips, percent, retention, without
from cplus.evaluate.letters import permuted
from cplus.evaluate.prior import answer_prior
from cplus.loop import (
    EpochEnded,
    Event,
    Prepared,
    Refreshed,
    Schedule,
    Stepped,
    adapt,
    epoch_batches,
    prepare,
    rate_factor,
)
from cplus.methods import METHODS, Material, Method
from cplus.optim import AdamW
from cplus.parting import answers
from cplus.predictions import Prediction
from cplus.records import RunResult, RunSpec, environment
from cplus.scoring import predict
from cplus.setting import Outside, Setting, material

Watch = Callable[[Event], None]
DIAGNOSTICS = (*OBSERVED, *AUDITED, "prior", "permuted")
"""The names that `RunSpec.diagnose` may hold."""

OPTIMIZERS: dict[str, Callable[[nn.Module, RunSpec], Optimizer]] = {
    "adamw": lambda model, spec: AdamW(model.parameters(), lr=spec.lr, weight_decay=spec.weight_decay),
    "sgd": lambda model, spec: SGD(model.parameters(), lr=spec.lr, weight_decay=spec.weight_decay),
}


def configured(spec: RunSpec) -> Method:
    """The spec's row of the table with what the spec says about its evidence and smoothing beyond the defaults."""
    return selection.configured(selection.method(spec.method), **spec.method_settings)


def run(spec: RunSpec, given: Setting, *, watch: Watch = lambda event: None) -> RunResult:
    """Adapt a copy of the base model by the spec's method and measure what was learned and lost."""
    row = configured(spec)
    model = row.trained(copy.deepcopy(given.base.model), spec.seed)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = OPTIMIZERS[spec.optimizer](model, spec)
    prepared = prepare(row, optimizer, model, material(given), seed=spec.seed)
    order = cast(Literal["file", "shuffled"], spec.order)
    schedule = Schedule(epochs=spec.epochs, batch_size=spec.batch_size, order=order)
    audited = _audited(spec, given, prepared.material, model)
    observation = _observation(spec, given, prepared, schedule)
    training, preservation, curve = Work(), Work(), _start(spec, given)
    started, paused = time.perf_counter(), 0.0
    rising = _rising(optimizer, spec, len(given.new))
    for event in adapt(model, optimizer, prepared, schedule=schedule, seed=spec.seed, scheduler=rising):
        if isinstance(event, Stepped):
            training += event.work
        elif isinstance(event, Refreshed):
            preservation += event.work
        elif isinstance(event, EpochEnded) and spec.evaluate_every and event.epoch % spec.evaluate_every == 0:
            before = time.perf_counter()
            curve.append({"epoch": float(event.epoch), **measure(given, model)})
            model.train()
            paused += time.perf_counter() - before
        observation(event)
        watch(event)
    seconds = time.perf_counter() - started - paused - observation.seconds
    extra = held_bytes(prepared)
    if prepared.guard is not None:
        prepared.guard.detach()
    model = merged(model).eval()
    seen = bool(curve) and curve[-1]["epoch"] == spec.epochs and row.adapter is None
    figures = {k: v for k, v in curve[-1].items() if k != "epoch"} if seen else measure(given, model)
    return RunResult(
        spec=spec,
        **figures,
        correction=_correction(given, model),
        diagnostics={**audited, **observation.report(), **_after_training(spec, given, model)},
        external={name: _after(model, outside) for name, outside in given.outside.items()},
        counts={"parameters": parameters, **_counts(given)},
        cost=_cost(parameters, training=training, preservation=preservation),
        seconds=seconds,
        extra_bytes=extra,
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


def _cost(parameters: int, **works: Work) -> dict[str, int]:
    """FLOPs of each kind of work, then its rows and tokens."""
    return {
        **{f"{name}_flops": work.flops(parameters) for name, work in works.items()},
        **{f"{name}_{k}": v for name, work in works.items() for k, v in dataclasses.asdict(work).items()},
    }


def _rising(optimizer: Optimizer, spec: RunSpec, new: int) -> LambdaLR | None:
    """The warm-up of the spec; a constant rate needs no schedule."""
    if not spec.warmup:
        return None
    total = spec.epochs * math.ceil(new / spec.batch_size)
    steps = round(spec.warmup * total)
    return LambdaLR(optimizer, lambda step: rate_factor(step, total=total, warmup=steps, course="constant"))


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
        found["past_nll"] = token_loss([answer for answer in past if answer.id not in anchors])
        found["new_nll"] = token_loss(new)
    return found


def token_loss(answers: Sequence[Prediction]) -> float:
    """The mean loss a token over all responses, in nats."""
    total = sum(score * count for a in answers for score, count in zip(a.scores, a.num_tokens, strict=True))
    return -total / sum(count for answer in answers for count in answer.num_tokens)


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
    return {"audit": audit(model, OPTIMIZERS[spec.optimizer](model, spec), batches, evidences, beta=spec.beta)}


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


def held_bytes(prepared: Prepared) -> int:
    """The guard's memory at its highest: kept from step to step, and during a step."""
    return 0 if prepared.guard is None else prepared.guard.nbytes + prepared.guard.step_nbytes


def _after(model: nn.Module, outside: Outside) -> dict[str, float]:
    after = predict(model, outside.interface, outside.examples)
    table = flips(outside.before, after)
    return {"before": percent(outside.before), "after": percent(after), "kept": retention(table).percent}
