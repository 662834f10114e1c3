"""From a study's spec to its result: what methods share, one training, and its measurement."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cplus import models
from cplus.base.cost import cost_row
from cplus.base.environment import environment
from cplus.data import interfaces
from cplus.data.examples import Choice, Example, FreeForm, Message, Prediction
from cplus.data.interfaces import Interface
from cplus.data.readers import PREFIX
from cplus.data.tasks import EXTERNAL, Split, cached_split, draw_anchors, draw_mixture, load_task, split, stack
from cplus.distributed import processes
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
from cplus.probes.abilities import GENERAL, MIN_YIELD
from cplus.probes.audit import short_audit
from cplus.probes.bank import Bank
from cplus.probes.build import cached_bank
from cplus.probes.labels import own_answers
from cplus.probes.settings import TOPICS, ProbeSettings, input_key
from cplus.training.driver import Done, Evaluate, Training, begin, build_optimizer
from cplus.training.loop import EpochEnded, Event, Prepared, Schedule, build_schedule, epoch_batches
from cplus.training.measure import answered, changes
from cplus.training.rows import Group, Part, PastTask
from cplus.training.settings import RunSpec, TrainSettings
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

    `cache` is a folder of splits. For free text that is `kept` and not learned the past rows hold the base model's own
    answers. Where a text's tokens are not those that the model wrote, one pass may not repeat it; such rows are left
    out.
    """
    bound, examples = _rows(base, task, interface, num_rows)
    if not kept or interface != "freeform":
        return bound, _split(base, bound, examples, cache, compute_dtype)
    found = _split(base, bound, own_answers(base, bound, examples, name=task), cache, compute_dtype)
    repeats = tuple(prediction for prediction in found.predictions if prediction.right)
    return bound, replace(found, new=(), predictions=repeats)


def _rows(
    base: models.Loaded, task: str, interface: str, num_rows: int | None
) -> tuple[Interface, tuple[Example, ...]]:
    """A task's interface and rows: in free text a multiple-choice row is a question with a terse answer."""
    found = load_task(task)
    examples = found.examples[:num_rows]
    bound = interfaces.build(interface, base.tokenizer, wording=found.wording)
    if interface == "freeform":
        return bound, tuple(terse(example) for example in examples)
    if not all(isinstance(example, Choice) for example in examples):
        raise ValueError(f"{task} is free text; expected the interface freeform for it, got {interface}")
    return bound, examples


def terse(example: Example) -> FreeForm:
    """A multiple-choice row as a request whose whole response is the right choice; free text stays as it is.

    >>> terse(Choice(id="q1", question="Is ice cold?", choices=("yes", "no"), answer=0)).response
    'yes'
    """
    if isinstance(example, FreeForm):
        return example
    request = (Message(role="user", content=example.question),)
    return FreeForm(id=example.id, messages=request, response=example.right)


def _split(
    base: models.Loaded, bound: Interface, examples: tuple[Example, ...], cache: Path | None, compute_dtype: str
) -> Split:
    whole = Group(name="task", part="external", interface=bound, examples=examples)

    def answers() -> list[Prediction]:
        with models.computing(compute_dtype, base.device):
            return answered(base.model, whole)

    if cache is None:
        return split(examples, answers())
    where = stack(device=str(base.device), compute_dtype=compute_dtype)
    return cached_split(cache, examples, answers, model_fingerprint=base.fingerprint, interface=bound.name, stack=where)


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
    bank: Bank | None = None
    """The sealed bank of the probes, where they were written from the anchors alone."""
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


External = Callable[[Loaded, str, RunSpec], Group]


def set_up(
    spec: RunSpec,
    base: Loaded,
    task: TaskSplit,
    banks: Path,
    *,
    kept: TaskSplit | None = None,
    external: External | None = None,
) -> Comparison:
    """Draw anchors and new rows by the seed; the base model writes the bank from the anchors alone, once.

    `task` is the new task; `kept` is the spec's `anchor_task`, where that is another one. `external` gives an external
    task with the base model's answers, for callers that cache them.
    """
    external = external or external_task
    if bool(spec.anchor_task) != (kept is not None):
        raise ValueError(
            f"expected the split of anchor_task {spec.anchor_task!r} if there is one; split it and pass it as kept"
        )
    interface, found = kept or task
    right = len(found.past) if spec.all_anchors else spec.num_anchors - spec.wrong_anchors
    anchors = draw_mixture(found, correct=right, wrong=spec.wrong_anchors, seed=spec.seed)
    wrong = _drawn(found.new, spec, "wrong") if kept else ()
    anchors, probes, written = _to_keep(spec, base, interface, anchors, banks)
    return Comparison(
        base=base,
        new=_known("new", "acquisition", task, new_rows(task[1], spec)),
        past=_known("past", "retention", (interface, found), _drawn(found.past, spec, "past")),
        split=found,
        anchors=anchors,
        probes=probes,
        wrong=_known("wrong", "retention", (interface, found), wrong) if wrong else None,
        external=tuple(external(base, name, spec) for name in spec.external),
        other_task=kept is not None,
        bank=written,
        compute_dtype=spec.compute_dtype,
    )


def _known(name: str, part: Part, task: TaskSplit, examples: Sequence[Example]) -> Group:
    """A group with the answers that the split holds."""
    interface, found = task
    answers = {prediction.id: prediction for prediction in found.predictions}
    known = tuple(answers[example.id] for example in examples)
    return Group(name=name, part=part, interface=interface, examples=tuple(examples), known=known)


def _to_keep(
    spec: RunSpec, base: Loaded, interface: Interface, anchors: tuple[Example, ...], banks: Path
) -> tuple[tuple[Example, ...], tuple[Example, ...], Bank | None]:
    """Anchors and probes: given ones and a bank written from them, rows written from nothing, or both."""
    if spec.keep == "anchors":
        sealed = cached_bank(base, interface, anchors, spec.settings.probes, banks=banks) if spec.num_probes else None
        return anchors, sealed.examples if sealed else (), sealed
    few = spec.num_probes if spec.keep == "general" else spec.num_probes // 2
    settings = ProbeSettings(
        num_probes=spec.num_anchors + few,
        temperature=spec.temperature,
        topics=TOPICS,
        seed=spec.seed,
        min_yield=MIN_YIELD,
        ability=GENERAL,
    )
    written = cached_bank(base, interface, (), settings, banks=banks).examples
    own, probes = written[: spec.num_anchors], written[spec.num_anchors :]
    if spec.keep == "general":
        return own, probes, None
    rest = replace(spec.settings.probes, num_probes=spec.num_probes - few)
    given = cached_bank(base, interface, anchors, rest, banks=banks).examples
    return (*anchors, *own), (*given, *probes), None


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


OnEvent = Callable[[Event], None]
TRAINING_BYTES = 28
"""Bytes per parameter that training takes beside the weights: gradients, moments, gate, a step's copies and passes."""
DIAGNOSTICS = (*OBSERVED, *AUDITED, "bank", "prior", "permuted")
"""The names that `RunSpec.diagnose` may hold."""


def begun(spec: RunSpec, given: Comparison) -> Training:
    """A copy of the base model, prepared for training by the spec's method; each process has its part of it."""
    if processes.size() > 1 and (spec.diagnose or needs_whole(spec.settings.row, spec.seed)):
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


def in_memory(settings: TrainSettings, model: nn.Module) -> TrainSettings:
    """The settings, with gradient checkpointing where memory is short: slower, with the same numbers."""
    first = next(model.parameters())
    numbers = sum(p.numel() for p in model.parameters()) // processes.size()
    short = free_bytes(first.device) < TRAINING_BYTES * numbers
    return settings.model_copy(update={"gradient_checkpointing": short})


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
    return {"rows": f"the paper's {task}" if same else f"not the paper's {task}; 'cplus study data verify' tells more"}


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
        found["permuted"] = permuted(answers, rows)
    return found


def _external(given: Comparison, model: nn.Module, group: Group) -> dict[str, float]:
    with given.computing():
        after = answered(model, group)
    kept = retention(flips(group.known, after)).percent
    return {"before": percent(group.known), "after": percent(after), "kept": kept}
