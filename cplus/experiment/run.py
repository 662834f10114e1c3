"""From a study's spec to its result: train a copy of the base model by one method and measure it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cplus import world
from cplus.cost import cost_row
from cplus.data.examples import Example
from cplus.data.paper_sets import paper_sets
from cplus.data.predictions import Prediction
from cplus.data.split import draw_anchors
from cplus.diagnostics import AUDITED, OBSERVED, Observation
from cplus.diagnostics.mask_audit import BUDGETS, Evidences, audit
from cplus.environment import environment
from cplus.evaluation import acquisition, correction, flips, percent, retention, without
from cplus.evaluation.letters import permuted
from cplus.evaluation.prior import answer_prior
from cplus.evaluation.statistics import token_loss
from cplus.experiment.comparison import Comparison
from cplus.experiment.driver import Done, Evaluate, Training, begin, build_optimizer
from cplus.experiment.measure import answered, changes
from cplus.experiment.record import RunResult
from cplus.experiment.rows import Group
from cplus.experiment.schedule import build_schedule
from cplus.experiment.settings import RunSpec, Settings
from cplus.experiment.sharding import needs_whole, sharded
from cplus.loop import EpochEnded, Event, Prepared, Schedule, epoch_batches
from cplus.methods import METHODS, Material
from cplus.models import Loaded
from cplus.offload import free_bytes
from cplus.probes.audit import short_audit
from cplus.repairing.search import repair_row
from cplus.scoring import predict

OnEvent = Callable[[Event], None]
TRAINING_BYTES = 28
"""Bytes per parameter that training takes beside the weights: gradients, moments, gate, a step's copies and passes."""
DIAGNOSTICS = (*OBSERVED, *AUDITED, "bank", "prior", "permuted")
"""The names that `RunSpec.diagnose` may hold."""


def begun(spec: RunSpec, given: Comparison) -> Training:
    """A copy of the base model, prepared for training by the spec's method; each process has its part of it."""
    if world.size() > 1 and (spec.diagnose or needs_whole(spec.settings.row, spec.seed)):
        raise ValueError(f"{spec.method} with diagnostics {spec.diagnose} needs whole weights; use a larger device")
    base = dataclasses.replace(given.base, model=copy.deepcopy(given.base.model))
    return begin(in_memory(spec.settings, base.model), base, given.new, [given.past_task], sharded)


@contextmanager
def set_aside(base: Loaded) -> Iterator[None]:
    """The base model in the host's memory while its copy trains on the device."""
    if base.device.type == "cpu":
        yield
        return
    base.model.to("cpu")
    try:
        yield
    finally:
        base.model.to(base.device)


def in_memory(settings: Settings, model: nn.Module) -> Settings:
    """The settings, with gradient checkpointing where memory is short: slower, with the same numbers."""
    first = next(model.parameters())
    numbers = sum(p.numel() for p in model.parameters()) // world.size()
    return dataclasses.replace(settings, gradient_checkpointing=free_bytes(first.device) < TRAINING_BYTES * numbers)


def run(spec: RunSpec, given: Comparison, *, watch: OnEvent = lambda event: None) -> RunResult:
    """Adapt a copy of the base model by the spec's method and measure what was learned and lost."""
    training = begun(spec, given)
    with set_aside(given.base):
        return _trained(spec, given, training, watch)


def _trained(spec: RunSpec, given: Comparison, training: Training, watch: OnEvent) -> RunResult:
    model, prepared, log = training.model, training.prepared, training.log
    parameters = sum(p.numel() for p in model.parameters())
    audited = _audited(spec, given, prepared.material, model)
    observation = _observation(spec, given, prepared, build_schedule(training.settings))
    curve = _start(spec, given)
    for event in training.run(*_until_learned(spec, given, training)):
        if isinstance(event, EpochEnded) and spec.evaluate_every and event.epoch % spec.evaluate_every == 0:
            with training.whole() as whole:
                curve.append({"epoch": float(event.epoch), **measure(given, whole)})
            log.done |= spec.stop_loss is not None and curve[-1]["new_nll"] <= spec.stop_loss
            model.train()
        observation(event)
        watch(event)
    model = training.finish()
    changed = prepared.method.adapter is not None or prepared.method.after is not None
    seen = bool(curve) and curve[-1]["epoch"] == log.cursor.epoch - 1 and not changed
    figures = {k: v for k, v in curve[-1].items() if k != "epoch"} if seen else measure(given, model)
    return RunResult(
        spec=spec,
        **figures,
        correction=_correction(given, model),
        anchors_right=_anchors_right(given, model),
        repair=repair_row(training.repaired),
        diagnostics={
            **audited,
            **observation.report(),
            **_bank(spec, given),
            **_after_training(spec, given, model),
            **({} if prepared.method.after is None else {"seconds_after_training": training.finishing}),
        },
        external={group.name: _external(given, model, group) for group in given.external},
        counts={"parameters": parameters, "updates": log.cursor.step, **_counts(given)},
        cost=cost_row(parameters, training=log.training, preservation=log.preservation),
        seconds=log.seconds - observation.seconds,
        extra_bytes=log.extra_bytes,
        curve=curve,
        environment={
            **environment(threads=torch.get_num_threads(), device=str(given.base.device)),
            **_whose_rows(spec, given),
        },
    )


def _whose_rows(spec: RunSpec, given: Comparison) -> dict[str, str]:
    """For one of the paper's tasks, whether its rows are the paper's."""
    task = spec.anchor_task or spec.task
    if task not in paper_sets():
        return {}
    same = given.split.data_fingerprint == paper_sets()[task].sha256
    return {"rows": f"the paper's {task}" if same else f"not the paper's {task}; 'cplus data verify' says what differs"}


def _until_learned(spec: RunSpec, given: Comparison, training: Training) -> tuple[Evaluate, Done]:
    """The evaluation after each epoch that `stop_at` needs, and whether training ends with it."""
    learned: list[float] = []

    def evaluate(epoch: int) -> dict[str, float]:
        if spec.stop_at is None:
            return {}
        with training.whole() as model, given.computing():
            found = acquisition(changes(given.new.known, answered(model, given.new))).percent
        if learned or found >= spec.stop_at:
            learned.append(found)
        return {"acquisition": found}

    return evaluate, lambda point: "learned" if len(learned) > spec.beyond else None


def _counts(given: Comparison) -> dict[str, int]:
    return {
        "past": len(given.split.past),
        "asked": len(given.past.examples),
        "wrong": 0 if given.wrong is None else len(given.wrong.examples),
        "new": len(given.new.examples),
        "anchors": len(given.anchors),
        "probes": len(given.probes),
        "overlap": len(given.covered),
    }


def measure(given: Comparison, model: nn.Module) -> dict[str, float]:
    """Retention over the past rows, the same without those the bank covers, and Acquisition over the new rows.

    Paper: Sec. 4.1, Evaluation. Anchors of another task are left out of Retention, as in App. E.4.
    """
    model.eval()
    with given.computing():
        return _figures(given, answered(model, given.past), answered(model, given.new))


def _figures(given: Comparison, past: Sequence[Prediction], new: Sequence[Prediction]) -> dict[str, float]:
    """Retention and Acquisition by these answers; for free text also the losses of the responses."""
    anchors = {example.id for example in given.anchors} if given.other_task else set()
    kept = without(changes(given.past.known, past), anchors)
    found = {
        "retention": retention(kept).percent,
        "retention_uncovered": retention(without(kept, given.covered)).percent,
        "acquisition": acquisition(changes(given.new.known, new)).percent,
    }
    if not given.past.closed:
        found["past_nll"] = _loss([answer for answer in past if answer.id not in anchors])
        found["new_nll"] = _loss(new)
    return found


def _loss(answers: Sequence[Prediction]) -> float:
    pairs = [pair for answer in answers for pair in zip(answer.scores, answer.num_tokens, strict=True)]
    return token_loss((score * count, count) for score, count in pairs)


def _start(spec: RunSpec, given: Comparison) -> list[dict[str, float]]:
    """The curve's first point, the base model's: for free text, whose losses do not start at a known value."""
    if not spec.evaluate_every or given.past.closed:
        return []
    return [{"epoch": 0.0, **_figures(given, given.past.known, given.new.known)}]


def _correction(given: Comparison, model: nn.Module) -> float | None:
    """The share of the past task's wrong rows that the trained model answers correctly, anchors left out."""
    if given.wrong is None:
        return None
    with given.computing():
        table = changes(given.wrong.known, answered(model, given.wrong))
    return correction(table, {example.id for example in given.anchors}).percent


def _anchors_right(given: Comparison, model: nn.Module) -> float | None:
    """The share of the anchors of another task that the trained model answers correctly.

    Paper: Table 4, accuracy on the supplied anchors.
    """
    if not given.other_task or not given.anchors or not given.past.closed:
        return None
    with given.computing():
        return percent(predict(model, given.past.interface, given.anchors))


def _observation(spec: RunSpec, given: Comparison, prepared: Prepared, schedule: Schedule) -> Observation:
    """The taps the spec names; their full-data reference takes every past row as an anchor."""
    if unknown := [name for name in spec.diagnose if name not in DIAGNOSTICS]:
        raise ValueError(f"unknown diagnostic {unknown[0]!r}; expected some of {', '.join(DIAGNOSTICS)}")
    names = [name for name in spec.diagnose if name in OBSERVED]
    full = prepared.material
    if names:
        rows = [given.past.interface.encode(example) for example in given.split.past]
        past = tuple(dataclasses.replace(each, anchors=rows) for each in full.past)
        full = dataclasses.replace(full, past=past)
    return Observation(names, prepared, full=full, schedule=schedule, seed=spec.seed)


def _audited(spec: RunSpec, given: Comparison, rows: Material, model: nn.Module) -> dict[str, Any]:
    """The mask audit at the base model's weights, over one epoch of plain fine-tuning's updates."""
    if "audit" not in spec.diagnose:
        return {}
    past, encoded = given.split.past, given.past.interface.encode
    counts = [count for count in sorted({*BUDGETS, spec.num_anchors}) if 0 < count <= len(past)]
    evidences = Evidences(
        anchors={count: [encoded(e) for e in draw_anchors(given.split, count, spec.seed)] for count in counts},
        num_anchors=spec.num_anchors,
        probes=rows.rows("probes"),
        past=[encoded(example) for example in past],
        anchor_weight=spec.anchor_weight,
    )
    once = dataclasses.replace(build_schedule(spec.settings), epochs=1)
    batches = epoch_batches(METHODS["sft"], rows, once, seed=spec.seed, epoch=1)
    optimizer = build_optimizer(spec.settings, model)
    with given.computing():  # the audit never changes the weights
        return {"audit": audit(model, optimizer, batches, evidences, beta=spec.beta)}


def _bank(spec: RunSpec, given: Comparison) -> dict[str, Any]:
    """The audit of the run's bank against all rows of the past task.

    Paper: App. C.2.
    """
    if "bank" not in spec.diagnose:
        return {}
    if given.bank is None:
        raise ValueError(f"{spec.method} writes no bank from anchors, so there is none to audit; leave 'bank' out")
    return {"bank": short_audit(given.bank, [*given.split.past, *given.split.new])}


def _after_training(spec: RunSpec, given: Comparison, model: nn.Module) -> dict[str, Any]:
    """The diagnostics that need the trained model alone: `prior` and `permuted`."""
    found: dict[str, Any] = {}
    interface, rows = given.past.interface, given.past.examples

    def answers(some: Sequence[Example]) -> list[Prediction]:
        with given.computing():
            return predict(model, interface, some)

    if "prior" in spec.diagnose:
        after = answers(rows)
        found["prior"] = answer_prior(given.past.known, after, rows, by_letter=interface.name == "letter")
    if "permuted" in spec.diagnose:
        if interface.name != "letter":
            raise ValueError(f"permuting options requires the letter interface, got {spec.interface}")
        found["permuted"] = permuted(answers, rows).row()
    return found


def _external(given: Comparison, model: nn.Module, group: Group) -> dict[str, float]:
    with given.computing():
        after = answered(model, group)
    kept = retention(flips(group.known, after)).percent
    return {"before": percent(group.known), "after": percent(after), "kept": kept}
