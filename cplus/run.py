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
from torch.optim import SGD, AdamW, Optimizer

from cplus import interfaces, models
from cplus.cost import Work
from cplus.data.encoded import Encoded
from cplus.data.examples import Example
from cplus.data.split import Split, draw_anchors, split, stack
from cplus.evaluate import acquisition, flips, percent, retention, without
from cplus.files import fingerprint
from cplus.gates import Collaborative
from cplus.interfaces import Interface
from cplus.loop import EpochEnded, Event, Prepared, Refreshed, Schedule, Stepped, adapt, prepare
from cplus.methods import Material, Method, Past, method
from cplus.predictions import Prediction
from cplus.probes.bank import Bank
from cplus.probes.build import build, identify
from cplus.probes.local import LocalEngine
from cplus.probes.settings import Settings
from cplus.probes.texts import input_key
from cplus.records import RunResult, RunSpec, environment
from cplus.scoring import predict
from cplus.tasks import load_task

Watch = Callable[[Event], None]

OPTIMIZERS: dict[str, Callable[[nn.Module, RunSpec], Optimizer]] = {
    "adamw": lambda model, spec: AdamW(model.parameters(), lr=spec.lr, weight_decay=spec.weight_decay, fused=True),
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
    """What all methods of one comparison share: base model, split, anchors, new rows and bank."""

    base: models.Loaded
    interface: Interface
    split: Split
    anchors: tuple[Example, ...]
    new: tuple[Example, ...]
    probes: tuple[Example, ...]
    outside: dict[str, Outside]

    @property
    def covered(self) -> set[str]:
        """The ids of past questions that also stand in the bank."""
        asked = {input_key(probe, options=False) for probe in self.probes}
        return {example.id for example in self.split.past if input_key(example, options=False) in asked}


def encode(examples: Sequence[Example], tokenizer: Any, *, interface: str = "freeform") -> list[Encoded]:
    """Examples as the tokens that training and evidence see."""
    bound = interfaces.build(interface, tokenizer)
    return [bound.encode(example) for example in examples]


def part(base: models.Loaded, task: str, interface: str) -> tuple[Interface, Split]:
    """Run the base model once over a task and part it into past and new."""
    found = load_task(task)
    bound = interfaces.build(interface, base.tokenizer, wording=found.wording)
    parted = split(
        found.examples,
        predict(base.model, bound, found.examples),
        model_fingerprint=base.fingerprint,
        interface=interface,
        stack=stack(device=str(base.device)),
    )
    return bound, parted


def set_up(spec: RunSpec, base: models.Loaded, parted: tuple[Interface, Split], banks: Path) -> Setting:
    """Draw anchors and new rows by the seed; the base model writes the bank from the anchors alone, once."""
    interface, found = parted
    anchors = draw_anchors(found, spec.num_anchors, spec.seed)
    return Setting(
        base=base,
        interface=interface,
        split=found,
        anchors=anchors,
        new=new_rows(found, spec),
        probes=bank(spec, base, interface, anchors, banks).examples if spec.num_probes else (),
        outside={name: _outside(base, name, spec) for name in spec.external},
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


def _outside(base: models.Loaded, name: str, spec: RunSpec) -> Outside:
    task = load_task(name)
    examples = random.Random(f"{spec.seed}/{name}").sample(task.examples, len(task.examples))[: spec.external_limit]
    bound = interfaces.build(spec.interface, base.tokenizer, wording=task.wording)
    return Outside(examples=tuple(examples), interface=bound, before=tuple(predict(base.model, bound, examples)))


def configured(spec: RunSpec) -> Method:
    """The spec's row of the table with the spec's blend weight and smoothing, where the row has them."""
    row = method(spec.method)
    if {kind for _, kind in row.evidence} == {"anchors", "probes"}:
        weights = {"anchors": spec.anchor_weight, "probes": 1.0 - spec.anchor_weight}
        row = dataclasses.replace(row, evidence=tuple((weights[kind], kind) for _, kind in row.evidence))
    if row.name == "cplus" and spec.beta != 0.9:
        row = dataclasses.replace(row, gate=lambda seed: Collaborative(beta=spec.beta))
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
    return Material(new=[given.interface.encode(example) for example in given.new], past=(past,))


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
    model = copy.deepcopy(given.base.model)
    optimizer = OPTIMIZERS[spec.optimizer](model, spec)
    prepared = prepare(configured(spec), optimizer, model, material(given), seed=spec.seed)
    order = cast(Literal["file", "shuffled"], spec.order)
    schedule = Schedule(epochs=spec.epochs, batch_size=spec.batch_size, order=order)
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
        watch(event)
    seconds = time.perf_counter() - started - paused
    extra = held_bytes(prepared)
    if prepared.guard is not None:
        prepared.guard.detach()
    parameters = sum(p.numel() for p in model.parameters())
    return RunResult(
        spec=spec,
        **measure(given, model),
        external={name: _after(model, outside) for name, outside in given.outside.items()},
        counts={
            "parameters": parameters,
            "past": len(given.split.past),
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
    """Retention over all past rows, the same without those the bank covers, and Acquisition over the new rows.

    Paper: Sec. 4.1, Evaluation.
    """
    model.eval()
    rows = (*given.split.past, *given.new)
    ids = {example.id for example in rows}
    before = [p for p in given.split.predictions if p.id in ids]
    table = flips(before, predict(model, given.interface, rows))
    uncovered = without(table, given.covered)
    return {
        "retention": retention(table).percent,
        "retention_uncovered": retention(uncovered).percent,
        "acquisition": acquisition(table).percent,
    }


def held_bytes(prepared: Prepared) -> int:
    """The guard's memory at its highest: kept from step to step, and during a step."""
    return 0 if prepared.guard is None else prepared.guard.nbytes + prepared.guard.step_nbytes


def _after(model: nn.Module, outside: Outside) -> dict[str, float]:
    after = predict(model, outside.interface, outside.examples)
    table = flips(outside.before, after)
    return {"before": percent(outside.before), "after": percent(after), "kept": retention(table).percent}
