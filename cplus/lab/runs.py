"""From a study's spec to its result: what methods share, one training, and its measurement."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cplus import models
from cplus.base.cost import Work, cost_row
from cplus.base.environment import environment
from cplus.data import interfaces
from cplus.data.examples import Choice, Example, FreeForm, Message, Prediction
from cplus.data.interfaces import Interface
from cplus.data.readers import PREFIX
from cplus.data.tasks import EXTERNAL, Split, cached_split, draw_anchors, draw_mixture, load_task, split, stack
from cplus.distributed import processes
from cplus.evaluation.abilities import GENERAL
from cplus.evaluation.changes import acquisition, answer_prior, correction, flips, percent, permuted, retention, without
from cplus.evaluation.statistics import token_loss
from cplus.lab.diagnostics import AUDITED, BUDGETS, OBSERVED, Evidences, Observation, audit
from cplus.lab.paper_sets import paper_sets
from cplus.lab.records import RunResult
from cplus.methods.repair import repair_row
from cplus.methods.table import METHODS, Material
from cplus.methods.variants import free_bytes
from cplus.models import Loaded
from cplus.models.scoring import predict
from cplus.probes.audit import short_audit
from cplus.probes.bank import Bank
from cplus.probes.build import cached_bank
from cplus.probes.labels import own_answers
from cplus.probes.settings import input_key
from cplus.probes.writing import writing
from cplus.training.driver import Training, begin, build_optimizer
from cplus.training.loop import EpochEnded, build_schedule, epoch_batches
from cplus.training.measure import BaseRow, answered, base_rows, changes, divergence
from cplus.training.rows import Group, Part, PastTask
from cplus.training.settings import RunSpec
from cplus.training.sharding import needs_whole, sharded

# What the base model knows of a task: its rows split into past (answered correctly) and new (answered incorrectly).


TaskSplit = tuple[Interface, Split]


def split_task(
    base: models.Loaded,
    task: str,
    interface: str,
    cache: Path | None = None,
    compute_dtype: str = "float32",
    num_rows: int | None = None,
    *,
    kept: bool = False,
) -> TaskSplit:
    """Run the base model once over a task's first rows and split them into past and new ones.

    `cache` is a folder of splits. In free text a multiple-choice row is a question with a terse answer; the past rows
    of a task that is `kept` and not learned hold the base model's own answers. Where a text's tokens are not those that
    the model wrote, one pass may not repeat it; such rows are left out.
    """
    found = load_task(task)
    examples: tuple[Example, ...] = found.examples[:num_rows]
    bound = interfaces.build(interface, base.tokenizer, wording=found.wording)
    own = kept and interface == "freeform"
    if interface == "freeform":
        examples = tuple(terse(example) for example in examples)
    elif not all(isinstance(example, Choice) for example in examples):
        raise ValueError(f"{task} is free text; expected the interface freeform for it, got {interface}")
    if own:
        examples = own_answers(base, bound, examples, name=task)

    def answers() -> list[Prediction]:
        with models.computing(compute_dtype, base.device):
            return answered(base.model, Group(name="task", part="external", interface=bound, examples=examples))

    if cache is None:
        halves = split(examples, answers())
    else:
        known = {"model_fingerprint": base.fingerprint, "interface": bound.name}
        where = stack(device=str(base.device), compute_dtype=compute_dtype)
        halves = cached_split(cache, examples, answers, stack=where, **known)
    if own:
        repeats = tuple(prediction for prediction in halves.predictions if prediction.right)
        halves = replace(halves, new=(), predictions=repeats)
    return bound, halves


def terse(example: Example) -> FreeForm:
    """A multiple-choice row as a request whose whole response is the right choice; free text stays as it is.

    >>> terse(Choice(id="q1", question="Is ice cold?", choices=("yes", "no"), answer=0)).response
    'yes'
    """
    if isinstance(example, FreeForm):
        return example
    request = (Message(role="user", content=example.question),)
    return FreeForm(id=example.id, messages=request, response=example.right)


# What all methods of one comparison share: base model, past and new rows, anchors, bank and external tasks.


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything but the method: every group comes with the base model's answers.

    `split` is that of the task whose past rows are kept; `wrong` are the rows of it that the base model answers
    incorrectly, measured only where another task is learned.
    """

    base: Loaded
    new: Group
    past: Group
    split: Split
    anchors: tuple[Example, ...]
    probes: tuple[Example, ...]
    wrong: Group | None
    external: tuple[Group, ...]
    other_task: bool
    """Whether anchors and past rows are of another task than the new rows."""
    held: Group | None = None
    """Free text: new rows that are not trained on."""
    bases: tuple[BaseRow, ...] = ()
    """Free text: what the base model expects at past rows that are no anchors and in no bank."""
    bank: Bank | None = None
    """The sealed bank of the probes, where they were written from the anchors alone."""
    written: float = 0.0
    """About the tokens that the base model read and wrote for all its banks, those of rejected rows among them."""
    compute_dtype: str = "float32"

    def computing(self) -> AbstractContextManager[None]:
        """The context of evaluations in the precision of the run; it must end before the weights change."""
        return models.computing(self.compute_dtype, self.base.device)

    @property
    def past_task(self) -> PastTask:
        """The one past task; the base model itself wrote its bank."""
        return PastTask(
            name="past",
            interface=self.past.interface,
            anchors=self.anchors,
            probes=self.probes,
            written_by=self.base.fingerprint,
        )

    @property
    def covered(self) -> set[str]:
        """The ids of past rows whose question is also in the bank."""
        written = {input_key(probe, options=False) for probe in self.probes}
        return {example.id for example in self.past.examples if input_key(example, options=False) in written}


HELD_OUT = 48
"""New rows of the same kind whose loss is measured and that are not trained on, where there are so many."""


def set_up(
    spec: RunSpec,
    base: Loaded,
    task: TaskSplit,
    banks: Path,
    *,
    kept: TaskSplit | None = None,
    external: Callable[[Loaded, str, RunSpec], Group] | None = None,
) -> Comparison:
    """Draw anchors and new rows by the seed; the base model writes the bank from the anchors alone, once.

    `task` is the new task; `kept` is the spec's `anchor_task`, where that is another one. `external` gives an external
    task with the base model's answers, for callers that cache them.
    """
    if bool(spec.anchor_task) != (kept is not None):
        raise ValueError(
            f"expected the split of anchor_task {spec.anchor_task!r} if there is one; split it and pass it as kept"
        )
    interface, found = kept or task
    right = len(found.past) if spec.all_anchors else spec.num_anchors - spec.wrong_anchors
    anchors = draw_mixture(found, correct=right, wrong=spec.wrong_anchors, seed=spec.seed)
    wrong = _drawn(found.new, spec, "wrong") if kept else ()
    asked = found.past
    if spec.interface == "freeform":
        # The evaluated rows are the same whether the anchors are given or written.
        drawn_ids = {example.id for example in draw_anchors(found, spec.num_anchors, spec.seed)}
        asked = tuple(example for example in asked if example.id not in drawn_ids) or asked
    # A bank written from the anchors, rows written from nothing as a job's, or half of the probes from each.
    few = {"anchors": 0, "general": spec.num_probes, "both": spec.num_probes // 2}[spec.keep]
    banks_of = []
    if few < spec.num_probes:
        given = replace(spec.settings.probes, num_probes=spec.num_probes - few)
        banks_of.append(cached_bank(base, interface, anchors, given, banks=banks))
    probes = tuple(probe for bank in banks_of for probe in bank.examples)
    sealed = banks_of[0] if banks_of and spec.keep == "anchors" else None
    if spec.keep != "anchors":
        settings = writing(interface, GENERAL, spec.num_anchors + few, temperature=spec.temperature, seed=spec.seed)
        banks_of.append(cached_bank(base, interface, (), settings, banks=banks))
        written = banks_of[-1].examples
        anchors = (*(anchors if spec.keep == "both" else ()), *written[: spec.num_anchors])
        probes = (*probes, *written[spec.num_anchors :])
    new = new_rows(task[1], spec)
    comparison = Comparison(
        base=base,
        new=_known("new", "acquisition", task, new),
        past=_known("past", "retention", (interface, found), _drawn(asked, spec, "past")),
        split=found,
        anchors=anchors,
        probes=probes,
        wrong=_known("wrong", "retention", (interface, found), wrong) if wrong else None,
        external=tuple((external or external_task)(base, name, spec) for name in spec.external),
        other_task=kept is not None,
        bank=sealed,
        written=sum(_tokens(interface, bank) for bank in banks_of),
        compute_dtype=spec.compute_dtype,
    )
    if spec.interface != "freeform":
        return comparison
    # The rows that show whether free text generalises, and how far the model moves elsewhere.
    trained, known = ({example.id for example in rows} for rows in (new, anchors))
    # Nearly the same rows for every seed, so that one level of their loss means the same.
    rows = random.Random("held").sample(task[1].new, len(task[1].new))
    drawn = [example for example in rows if example.id not in trained][:HELD_OUT]
    if spec.stop_loss is not None and not drawn:
        raise ValueError(
            f"stop_loss is the loss of new rows that are not trained on, but all {len(rows)} are; lower num_new"
        )
    known |= comparison.covered
    past = [interface.encode(example) for example in comparison.past.examples if example.id not in known]
    with comparison.computing():
        bases = tuple(base_rows(base.model, past))
    return replace(comparison, held=_known("held", "validation", task, drawn) if drawn else None, bases=bases)


def _tokens(interface: Interface, bank: Bank) -> float:
    """About the tokens a bank took: a request is written and then read for its answer, and some are rejected."""
    rows = [interface.encode(example) for example in bank.examples]
    return sum(2 * len(row.prompt) + len(row.target) for row in rows) / float(bank.manifest["yield"])


def _known(name: str, part: Part, task: TaskSplit, examples: Sequence[Example]) -> Group:
    """A group with the answers that the split holds."""
    interface, found = task
    answers = {prediction.id: prediction for prediction in found.predictions}
    known = tuple(answers[example.id] for example in examples)
    return Group(name=name, part=part, interface=interface, examples=tuple(examples), known=known)


def new_rows(found: Split, spec: RunSpec) -> tuple[Example, ...]:
    """All initially wrong rows in file order, or `num_new` of them drawn by the seed."""
    if spec.num_new is None:
        return found.new
    if spec.num_new > len(found.new):
        raise ValueError(
            f"num_new is {spec.num_new}, but only {len(found.new)} rows were initially wrong; choose fewer"
        )
    return tuple(random.Random(f"{spec.seed}/new").sample(found.new, spec.num_new))


def _drawn(rows: Sequence[Example], spec: RunSpec, what: str) -> tuple[Example, ...]:
    """All rows in their order, or `num_past` of them drawn by the seed."""
    if spec.num_past is None or spec.num_past >= len(rows):
        return tuple(rows)
    return tuple(random.Random(f"{spec.seed}/{what}").sample(rows, spec.num_past))


def external_task(base: Loaded, name: str, spec: RunSpec) -> Group:
    """An external task's rows, drawn by the seed, with the base model's answers."""
    task = load_task(name)
    if not all(isinstance(example, Choice) for example in task.examples):
        raise ValueError(f"external tasks are multiple choice, but {name} is free text; leave it out of external")
    examples = random.Random(f"{spec.seed}/{name}").sample(task.examples, len(task.examples))[: spec.external_limit]
    # The external benchmarks keep their own interface; lettered options would turn some into something else.
    own = name in EXTERNAL or name.startswith(PREFIX) or spec.interface == "freeform"
    interface = interfaces.build(task.interface if own else spec.interface, base.tokenizer, wording=task.wording)
    with models.computing(spec.compute_dtype, base.device):
        known = tuple(predict(base.model, interface, examples))
    return Group(name=name, part="external", interface=interface, examples=tuple(examples), known=known)


# From a study's spec to its result: train a copy of the base model by one method and measure it.


TRAINING_BYTES = 28
"""Bytes per parameter that training takes beside the weights: gradients, moments, gate, a step's copies and passes."""
DIAGNOSTICS = (*OBSERVED, *AUDITED, "bank", "prior", "permuted")
"""The names that `RunSpec.diagnose` may hold."""


def begun(spec: RunSpec, given: Comparison) -> Training:
    """A copy of the base model, prepared for training by the spec's method; each process has its part of it."""
    if processes.size() > 1 and (spec.diagnose or needs_whole(spec.settings.row, spec.seed)):
        raise ValueError(f"{spec.method} with diagnostics {spec.diagnose} needs whole weights; use a larger device")
    base = replace(given.base, model=copy.deepcopy(given.base.model))
    # Where memory is short, gradient checkpointing is slower and gives the same numbers.
    numbers = sum(p.numel() for p in base.model.parameters()) // processes.size()
    short = free_bytes(next(base.model.parameters()).device) < TRAINING_BYTES * numbers
    settings = spec.settings.model_copy(update={"gradient_checkpointing": short})
    return begin(settings, base, given.new, [given.past_task], sharded)


def run(spec: RunSpec, given: Comparison) -> RunResult:
    """Adapt a copy of the base model by the spec's method and measure what was learned and lost."""
    training = begun(spec, given)
    device = given.base.device
    given.base.model.to("cpu")  # while its copy trains on the device
    try:
        return _trained(spec, given, training)
    finally:
        given.base.model.to(device)


def _trained(spec: RunSpec, given: Comparison, training: Training) -> RunResult:
    model, prepared, log = training.model, training.prepared, training.log
    parameters = sum(p.numel() for p in model.parameters())
    if unknown := [name for name in spec.diagnose if name not in DIAGNOSTICS]:
        raise ValueError(f"unknown diagnostic {unknown[0]!r}; expected some of {', '.join(DIAGNOSTICS)}")
    audited = _audited(spec, given, prepared.material, model)
    taps, full = [name for name in spec.diagnose if name in OBSERVED], prepared.material
    if taps:  # their full-data reference takes every past row as an anchor
        rows = [given.past.interface.encode(example) for example in given.split.past]
        full = replace(full, past=tuple(replace(each, anchors=rows) for each in full.past))
    schedule = build_schedule(training.settings)
    observation = Observation(taps, prepared, full=full, schedule=schedule, seed=spec.seed)
    learned: list[float] = []

    def evaluate(epoch: int) -> dict[str, float]:
        """Whether training ends with this epoch, where that depends on what was learned."""
        if spec.stop_at is None:
            return {}
        with training.whole() as whole, given.computing():
            found = acquisition(changes(given.new.known, answered(whole, given.new))).percent
        if learned or found >= spec.stop_at:
            learned.append(found)
        return {"acquisition": found}

    curve: list[dict[str, float]] = []
    if spec.evaluate_every and not given.past.closed:  # in free text the losses do not start at a known value
        held = {"held_nll": _loss(given.held.known)} if given.held else {}
        curve.append({"epoch": 0.0, **held, **({"divergence": 0.0} if given.bases else {})})
    for event in training.run(evaluate, lambda point: "learned" if len(learned) > spec.beyond else None):
        if isinstance(event, EpochEnded) and spec.evaluate_every and event.epoch % spec.evaluate_every == 0:
            with training.whole() as whole:
                curve.append(
                    {"epoch": float(event.epoch), **(measure if given.past.closed else elsewhere)(given, whole)}
                )
            log.done |= spec.stop_loss is not None and curve[-1]["held_nll"] <= spec.stop_loss
            model.train()
        observation(event)
    recurring = log.preservation.flops(parameters)
    model = training.finish()
    after = prepared.method.after
    seen = bool(curve) and curve[-1]["epoch"] == log.cursor.epoch - 1 and not (prepared.method.adapter or after)
    point = {k: v for k, v in curve[-1].items() if k != "epoch"} if seen else {}
    figures = point if "retention" in point else measure(given, model, point)
    machine = environment(threads=torch.get_num_threads(), device=str(given.base.device))
    if known := paper_sets().get(task := spec.anchor_task or spec.task):
        same = given.split.data_fingerprint == known.sha256
        machine["rows"] = (
            f"the paper's {task}" if same else f"not the paper's {task}; 'cplus study data verify' tells more"
        )
    return RunResult(
        spec=spec,
        **figures,
        **_of_the_anchors_task(given, model),
        repair=repair_row(training.repaired),
        diagnostics={
            **audited,
            **observation.report(),
            **_after_training(spec, given, model),
            **({} if after is None else {"seconds_after_training": training.finishing}),
        },
        external={group.name: _external(given, model, group) for group in given.external},
        counts={
            "parameters": parameters,
            "updates": log.cursor.step,
            "past": len(given.split.past),
            "asked": len(given.past.examples),
            "wrong": len(given.wrong.examples) if given.wrong else 0,
            "new": len(given.new.examples),
            "anchors": len(given.anchors),
            "probes": len(given.probes),
            "overlap": len(given.covered),
        },
        cost=cost_row(parameters, training=log.training, preservation=log.preservation),
        once={
            "before_flops": log.once.flops(parameters),
            "after_flops": log.preservation.flops(parameters) - recurring,
            "writing_flops": Work(forward=round(given.written)).flops(parameters),
        },
        seconds=log.seconds - observation.seconds,
        extra_bytes=log.extra_bytes,
        curve=curve,
        environment=machine,
    )


def measure(given: Comparison, model: nn.Module, known: Mapping[str, float] | None = None) -> dict[str, float]:
    """Retention over the past rows, the same without those the bank covers, and Acquisition over the new rows.

    For free text also the losses and what is `known` from `elsewhere`.

    Paper: Sec. 4.1, Evaluation. Anchors of another task are left out of Retention, as in App. E.4.
    """
    model.eval()
    with given.computing():
        found = _figures(given, answered(model, given.past), answered(model, given.new))
    return {**found, **(known or elsewhere(given, model))}


def elsewhere(given: Comparison, model: nn.Module) -> dict[str, float]:
    """Of free text: the loss of new rows that are not trained on, and the divergence at uncovered past rows."""
    model.eval()
    with given.computing():
        found = {"held_nll": _loss(answered(model, given.held))} if given.held else {}
        return found | ({"divergence": divergence(model, given.bases)} if given.bases else {})


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


def _of_the_anchors_task(given: Comparison, model: nn.Module) -> dict[str, Any]:
    """Where another task is learned: the shares of the anchors' task's wrong rows and of the anchors that are right.

    Paper: App. E.4; Table 4. Anchors are left out of the wrong rows.
    """
    found: dict[str, Any] = {"correction": None, "anchors_right": None}
    with given.computing():
        if given.wrong is not None:
            table = changes(given.wrong.known, answered(model, given.wrong))
            found["correction"] = correction(table, {example.id for example in given.anchors}).percent
        if given.other_task and given.anchors and given.past.closed:
            found["anchors_right"] = percent(predict(model, given.past.interface, given.anchors))
    return found


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
    once = replace(build_schedule(spec.settings), epochs=1)
    batches = epoch_batches(METHODS["sft"], rows, once, seed=spec.seed, epoch=1)
    optimizer = build_optimizer(spec.settings, model)
    with given.computing():  # the audit never changes the weights
        return {"audit": audit(model, optimizer, batches, evidences, beta=spec.beta)}


def _after_training(spec: RunSpec, given: Comparison, model: nn.Module) -> dict[str, Any]:
    """The diagnostics of the bank (App. C.2) and of the trained model alone: `bank`, `prior` and `permuted`."""
    found: dict[str, Any] = {}
    interface, rows = given.past.interface, given.past.examples

    def answers(some: Sequence[Example]) -> list[Prediction]:
        with given.computing():
            return predict(model, interface, some)

    if "bank" in spec.diagnose:
        if given.bank is None:
            raise ValueError(f"{spec.method} writes no bank from anchors, so there is none to audit; leave 'bank' out")
        found["bank"] = short_audit(given.bank, [*given.split.past, *given.split.new])
    if "prior" in spec.diagnose:
        found["prior"] = answer_prior(given.past.known, answers(rows), rows, by_letter=interface.name == "letter")
    if "permuted" in spec.diagnose:
        found["permuted"] = permuted(answers, rows, interface.name)
    return found


def _external(given: Comparison, model: nn.Module, group: Group) -> dict[str, float]:
    with given.computing():
        after = answered(model, group)
    kept = retention(flips(group.known, after)).percent
    return {"before": percent(group.known), "after": percent(after), "kept": kept}
