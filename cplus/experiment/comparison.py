"""What all methods of one comparison share: the base model, its past and new rows, anchors, bank and outside tasks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cplus import interfaces, models
from cplus.data.examples import Choice, Example
from cplus.data.harness import PREFIX
from cplus.data.predictions import Prediction
from cplus.data.split import Split, draw_mixture
from cplus.data.tasks import EXTERNAL, load_task
from cplus.experiment import material as experiment
from cplus.experiment.bank import cached_bank
from cplus.experiment.material import Kept
from cplus.experiment.record import RunSpec
from cplus.experiment.task_split import Parted
from cplus.interfaces import Interface
from cplus.methods import Material, Method
from cplus.probes.bank import Bank
from cplus.probes.settings import Settings
from cplus.probes.texts import input_key
from cplus.scoring import predict


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
    crossed: bool
    """Whether what is kept is of another task than what is learned."""

    @property
    def covered(self) -> set[str]:
        """The ids of past questions that also stand in the bank."""
        asked = {input_key(probe, options=False) for probe in self.probes}
        return {example.id for example in self.asked if input_key(example, options=False) in asked}


AskOutside = Callable[[models.Loaded, str, RunSpec], Outside]


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
        crossed=kept is not None,
    )


def bank(spec: RunSpec, base: models.Loaded, interface: Interface, anchors: Sequence[Example], banks: Path) -> Bank:
    """The sealed bank of these anchors and the spec's settings, from the folder of banks or written into it now."""
    settings = Settings(num_probes=spec.num_probes, shots=spec.shots, temperature=spec.temperature, seed=spec.seed)
    return cached_bank(base, interface, anchors, settings, banks=banks)


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
    if not all(isinstance(example, Choice) for example in task.examples):
        raise ValueError(f"outside tasks are multiple choice, but {name} is free text; leave it out of external")
    examples = random.Random(f"{spec.seed}/{name}").sample(task.examples, len(task.examples))[: spec.external_limit]
    # The external benchmarks keep their own way of asking; lettered options would turn some into something else.
    own_way = name in EXTERNAL or name.startswith(PREFIX) or spec.interface == "freeform"
    usual = task.interface if own_way else spec.interface
    bound = interfaces.build(usual, base.tokenizer, wording=task.wording)
    return Outside(examples=tuple(examples), interface=bound, before=tuple(predict(base.model, bound, examples)))


def material(row: Method, given: Setting) -> Material:
    """The setting's rows as tokens: one past task, whose bank the base model itself has written."""
    kept = Kept(
        name="past",
        interface=given.interface,
        anchors=given.anchors,
        probes=given.probes,
        written_by=given.base.fingerprint,
    )
    return experiment.material(row, [given.learned_by.encode(example) for example in given.new], [kept], given.base)
