"""What all methods of one comparison share: base model, past and new rows, anchors, bank and external tasks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from cplus import interfaces, models
from cplus.data.examples import Choice, Example
from cplus.data.harness import PREFIX
from cplus.data.split import Split, draw_mixture
from cplus.data.tasks import EXTERNAL, load_task
from cplus.experiment.bank_cache import cached_bank
from cplus.experiment.material import PastTask
from cplus.experiment.rows import Group, Part
from cplus.experiment.settings import RunSpec
from cplus.experiment.task_split import TaskSplit
from cplus.interfaces import Interface
from cplus.models import Loaded
from cplus.probes.abilities import GENERAL, MIN_YIELD
from cplus.probes.bank import Bank
from cplus.probes.settings import TOPICS, ProbeSettings
from cplus.probes.texts import input_key
from cplus.scoring import predict


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
        sealed = bank(spec, base, interface, anchors, banks) if spec.num_probes else None
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
    rest = replace(spec, num_probes=spec.num_probes - few)
    return (*anchors, *own), (*bank(rest, base, interface, anchors, banks).examples, *probes), None


def bank(spec: RunSpec, base: Loaded, interface: Interface, anchors: Sequence[Example], banks: Path) -> Bank:
    """The sealed bank of these anchors and the spec's settings, from the folder of banks or written into it now."""
    return cached_bank(base, interface, anchors, spec.settings.probes, banks=banks)


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
