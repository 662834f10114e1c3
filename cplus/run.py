"""From a spec to a result: the one place where model, data, bank, method and evaluation meet."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from cplus import interfaces, models
from cplus.adapters import merged
from cplus.cost import Work
from cplus.data.encoded import Encoded
from cplus.data.examples import Example
from cplus.data.harness import PREFIX
from cplus.data.split import Split, cached_split, draw_anchors, draw_mixture, split, stack
from cplus.diagnostics import AUDITED, OBSERVED, Observation
from cplus.diagnostics.audit import BUDGETS, Evidences, audit
from cplus.evaluate import Flip, acquisition, correction, flips, percent, retention, without
from cplus.evaluate.letters import permuted
from cplus.evaluate.prior import answer_prior
from cplus.evidence import Remembered
from cplus.files import fingerprint
from cplus.gates import Collaborative
from cplus.interfaces import Interface
from cplus.loop import EpochEnded, Event, Prepared, Refreshed, Schedule, Stepped, adapt, epoch_batches, prepare
from cplus.methods import Material, Method, Past, method
from cplus.optim import AdamW
from cplus.predictions import Prediction
from cplus.probes.bank import Bank
from cplus.probes.build import build, identify
from cplus.probes.local import LocalEngine
from cplus.probes.settings import Settings
from cplus.probes.texts import input_key
from cplus.records import RunResult, RunSpec, environment
from cplus.scoring import predict
from cplus.tasks import EXTERNAL, load_task

Watch = Callable[[Event], None]
DIAGNOSTICS = (*OBSERVED, *AUDITED, "prior", "permuted")
"""The names that `RunSpec.diagnose` may hold."""

OPTIMIZERS: dict[str, Callable[[nn.Module, RunSpec], Optimizer]] = {
    "adamw": lambda model, spec: AdamW(model.parameters(), lr=spec.lr, weight_decay=spec.weight_decay),
    "sgd": lambda model, spec: SGD(model.parameters(), lr=spec.lr, weight_decay=spec.weight_decay),
}


@dataclass(frozen=True, kw_only=True)
class Outside:
    """A task used neither for training nor as anchors, with the base model's answers."""

    examples: tuple[Example, ...]
    interface: Interface
    before: tuple[Prediction, ...]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all methods of one comparison share: base model, splits, anchors, new rows and bank.

    `split` parts the task whose past is kept, `learned` the one whose new rows are taught: one and the same unless
    the spec draws its anchors elsewhere. `asked` are the past rows that are asked again, `wrong` the wrong rows of
    a past task that is not the new one.
    """

    base: models.Loaded
    interface: Interface
    split: Split
    learned_by: Interface
    learned: Split
    anchors: tuple[Example, ...]
    new: tuple[Example, ...]
    probes: tuple[Example, ...]
    asked: tuple[Example, ...]
    wrong: tuple[Example, ...]
    outside: dict[str, Outside]

    @property
    def covered(self) -> set[str]:
        """The ids of past questions that also stand in the bank."""
        asked = {input_key(probe, options=False) for probe in self.probes}
        return {example.id for example in self.asked if input_key(example, options=False) in asked}


def encode(examples: Sequence[Example], tokenizer: Any, *, interface: str = "freeform") -> list[Encoded]:
    """Examples as the tokens that training and evidence see."""
    bound = interfaces.build(interface, tokenizer)
    return [bound.encode(example) for example in examples]


Parted = tuple[Interface, Split]
AskOutside = Callable[[models.Loaded, str, RunSpec], Outside]


def part(base: models.Loaded, task: str, interface: str, splits: Path | None = None) -> Parted:
    """Run the base model once over a task and part it into past and new; `splits` is a folder that remembers it."""
    found = load_task(task)
    bound = interfaces.build(interface, base.tokenizer, wording=found.wording)
    where = stack(device=str(base.device))

    def answers() -> list[Prediction]:
        return predict(base.model, bound, found.examples)

    known = {"model_fingerprint": base.fingerprint, "interface": interface}
    if splits is not None:
        return bound, cached_split(splits, found.examples, answers, stack=where, **known)
    return bound, split(found.examples, answers(), stack=where, **known)


def set_up(
    spec: RunSpec,
    base: models.Loaded,
    parted: Parted,
    banks: Path,
    *,
    kept: Parted | None = None,
    ask: AskOutside | None = None,
) -> Setting:
    """Draw anchors and new rows by the seed; the base model writes the bank from the anchors alone, once.

    `parted` is the new task; `kept` the spec's `anchor_task`, where that is another one. `ask` gives an outside task
    with the base model's answers, for those who remember them.
    """
    ask = ask or ask_outside
    if bool(spec.anchor_task) != (kept is not None):
        raise ValueError(f"expected the split of anchor_task {spec.anchor_task!r} if there is one; part it and pass it")
    interface, found = kept or parted
    right = spec.num_anchors - spec.wrong_anchors
    anchors = draw_mixture(found, correct=right, wrong=spec.wrong_anchors, seed=spec.seed)
    return Setting(
        base=base,
        interface=interface,
        split=found,
        learned_by=parted[0],
        learned=parted[1],
        anchors=anchors,
        new=new_rows(parted[1], spec),
        probes=bank(spec, base, interface, anchors, banks).examples if spec.num_probes else (),
        asked=_drawn(found.past, spec, "past"),
        wrong=_drawn(found.new, spec, "wrong") if kept else (),
        outside={name: ask(base, name, spec) for name in spec.external},
    )


def bank(spec: RunSpec, base: models.Loaded, interface: Interface, anchors: Sequence[Example], banks: Path) -> Bank:
    """The sealed bank of these anchors and settings, from the folder of banks or written into it now."""
    settings = Settings(num_probes=spec.num_probes, shots=spec.shots, temperature=spec.temperature, seed=spec.seed)
    engine = LocalEngine(base.model, base.tokenizer)
    key = fingerprint(identify(base, interface, anchors, settings, engine))
    return build(banks / f"bank-{key[:16]}", base, interface, anchors, settings, engine=engine)


def new_rows(found: Split, spec: RunSpec) -> tuple[Example, ...]:
    """All initially wrong rows in file order, or `num_new` of them drawn by the seed."""
    if spec.num_new is None:
        return found.new
    if spec.num_new > len(found.new):
        raise ValueError(f"asked for {spec.num_new} new rows, but only {len(found.new)} were initially wrong")
    return tuple(random.Random(f"{spec.seed}/new").sample(found.new, spec.num_new))


def _drawn(rows: Sequence[Example], spec: RunSpec, what: str) -> tuple[Example, ...]:
    """All rows in their order, or `num_past` of them drawn by the seed."""
    if spec.num_past is None or spec.num_past >= len(rows):
        return tuple(rows)
    return tuple(random.Random(f"{spec.seed}/{what}").sample(rows, spec.num_past))


def ask_outside(base: models.Loaded, name: str, spec: RunSpec) -> Outside:
    """An outside task's rows, drawn by the seed, with the base model's answers."""
    task = load_task(name)
    examples = random.Random(f"{spec.seed}/{name}").sample(task.examples, len(task.examples))[: spec.external_limit]
    # The external benchmarks keep their own way of asking; lettered options would turn some into something else.
    usual = task.interface if name in EXTERNAL or name.startswith(PREFIX) else spec.interface
    bound = interfaces.build(usual, base.tokenizer, wording=task.wording)
    return Outside(examples=tuple(examples), interface=bound, before=tuple(predict(base.model, bound, examples)))


def configured(spec: RunSpec) -> Method:
    """The spec's row of the table with the spec's blend weight and smoothing, where the row has them."""
    row = method(spec.method)
    if {kind for _, kind in row.evidence} == {"anchors", "probes"}:
        weights = {"anchors": spec.anchor_weight, "probes": 1.0 - spec.anchor_weight}
        row = dataclasses.replace(row, evidence=tuple((weights[kind], kind) for _, kind in row.evidence))
    if row.name == "cplus" and spec.beta != 0.9:
        row = dataclasses.replace(row, gate=lambda seed: Collaborative(beta=spec.beta))
    if spec.parts != 1 or spec.refresh is not None or spec.memory:
        if not row.evidence:
            raise ValueError(f"method {row.name!r} takes no evidence, so it has no parts, refresh or memory to set")
        row = dataclasses.replace(row, parts=spec.parts, refresh=spec.refresh or row.refresh)
    if spec.memory:
        reduce = row.reduction
        row = dataclasses.replace(row, reduction=lambda model, found: Remembered(reduce(model, found), spec.memory))
    return row


def material(given: Setting) -> Material:
    """The setting's rows as tokens.

    Before the first adaptation the latest model is the base model, whose answers the probes already carry; of them
    SSR replays as many as there are new rows.
    """
    probes = [given.interface.encode(example) for example in given.probes]
    past = Past(
        name="past",
        anchors=[given.interface.encode(example) for example in given.anchors],
        probes=probes,
        synthetic=probes[: len(given.new)],
        constant=constant(probes),
        balanced=balanced(probes),
    )
    return Material(new=[given.learned_by.encode(example) for example in given.new], past=(past,))


def constant(probes: Sequence[Encoded]) -> list[Encoded]:
    """The probes with the bank's most frequent answer in place of their own."""
    if not probes:
        return []
    [(answer, _)] = Counter(probe.target for probe in probes).most_common(1)
    return [Encoded(probe.prompt, answer) for probe in probes]


def balanced(probes: Sequence[Encoded]) -> list[Encoded]:
    """The first probes of each answer, no answer having more than an even share.

    >>> [row.target for row in balanced([Encoded((1,), (t,)) for t in (7, 7, 7, 8)])]
    [(7,), (7,), (8,)]
    """
    share = math.ceil(len(probes) / max(1, len({probe.target for probe in probes})))
    seen: Counter[tuple[int, ...]] = Counter()
    kept = []
    for probe in probes:
        seen[probe.target] += 1
        if seen[probe.target] <= share:
            kept.append(probe)
    return kept


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
    training, preservation, curve = Work(), Work(), []
    started, paused = time.perf_counter(), 0.0
    for event in adapt(model, optimizer, prepared, schedule=schedule, seed=spec.seed):
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
    model = merged(model)
    return RunResult(
        spec=spec,
        **measure(given, model),
        correction=_correction(given, model),
        diagnostics={**audited, **observation.report(), **_after_training(spec, given, model)},
        external={name: _after(model, outside) for name, outside in given.outside.items()},
        counts={
            "parameters": parameters,
            "past": len(given.split.past),
            "asked": len(given.asked),
            "wrong": len(given.wrong),
            "new": len(given.new),
            "anchors": len(given.anchors),
            "probes": len(given.probes),
            "overlap": len(given.covered),
        },
        cost={
            "training_flops": training.flops(parameters),
            "preservation_flops": preservation.flops(parameters),
            **{f"training_{k}": v for k, v in dataclasses.asdict(training).items()},
            **{f"preservation_{k}": v for k, v in dataclasses.asdict(preservation).items()},
        },
        seconds=seconds,
        extra_bytes=extra,
        curve=curve,
        environment=environment(threads=torch.get_num_threads(), device=str(given.base.device)),
    )


def measure(given: Setting, model: nn.Module) -> dict[str, float]:
    """Retention over the past rows, the same without those the bank covers, and Acquisition over the new rows.

    Paper: Sec. 4.1, Evaluation. Anchors of another task are left out of Retention, as in App. E.4.
    """
    model.eval()
    anchors = {example.id for example in given.anchors} if given.wrong else set()
    past = without(_changes(given.split, given.asked, model, given.interface), anchors)
    return {
        "retention": retention(past).percent,
        "retention_uncovered": retention(without(past, given.covered)).percent,
        "acquisition": acquisition(_changes(given.learned, given.new, model, given.learned_by)).percent,
    }


def _changes(parted: Split, rows: Sequence[Example], model: nn.Module, interface: Interface) -> list[Flip]:
    ids = {example.id for example in rows}
    return flips([p for p in parted.predictions if p.id in ids], predict(model, interface, rows))


def _correction(given: Setting, model: nn.Module) -> float | None:
    """The share of the past task's wrong rows that came right, anchors left out."""
    if not given.wrong:
        return None
    table = _changes(given.split, given.wrong, model, given.interface)
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
    batches = epoch_batches(method("sft"), rows, once, seed=spec.seed, epoch=1)
    return {"audit": audit(model, OPTIMIZERS[spec.optimizer](model, spec), batches, evidences, beta=spec.beta)}


def _after_training(spec: RunSpec, given: Setting, model: nn.Module) -> dict[str, Any]:
    """The diagnostics that need the trained model alone: `prior` and `permuted`."""
    found: dict[str, Any] = {}
    if "prior" in spec.diagnose:
        ids = {example.id for example in given.asked}
        before = [p for p in given.split.predictions if p.id in ids]
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
