"""From rows to material: new rows and every past task, as the tokens that training sees."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cplus.data.encoded import Encoded
from cplus.data.examples import Choice, Example
from cplus.experiment.rows import Group
from cplus.interfaces import Interface
from cplus.methods import Material, Method, Past
from cplus.models import Loaded
from cplus.probes.label import Label, label
from cplus.probes.local import LocalEngine


@dataclass(frozen=True, kw_only=True)
class PastTask:
    """A past task: its anchors, and the bank that a model wrote from them."""

    name: str
    interface: Interface
    anchors: tuple[Example, ...]
    probes: tuple[Example, ...] = ()
    written_by: str = ""
    """The fingerprint of the model that wrote the bank."""


def material(method: Method, group: Group, kept: Sequence[PastTask], current: Loaded) -> Material:
    """New rows and every past task's rows as tokens; SSR's share of synthetic rows is spread over the tasks."""
    new = group.encoded()
    choices = [group.interface.candidates(example) if group.closed else () for example in group.examples]
    share = math.ceil(len(new) / max(1, len(kept)))
    past = []
    for task in kept:
        encode = task.interface.encode
        latest = refined(task, current, share) if "synthetic" in method.needs else ()
        past.append(
            past_rows(
                task.name,
                anchors=[encode(example) for example in task.anchors],
                probes=[encode(example) for example in task.probes],
                synthetic=[encode(example) for example in latest],
            )
        )
    return Material(new=new, past=tuple(past), choices=dict(zip(new, choices, strict=True)))


def past_rows(
    name: str, *, anchors: Sequence[Encoded], probes: Sequence[Encoded], synthetic: Sequence[Encoded] = ()
) -> Past:
    """A past task's rows of every kind, the controls' made from the probes."""
    return Past(
        name=name,
        anchors=anchors,
        probes=probes,
        synthetic=synthetic,
        constant=constant(probes),
        balanced=balanced(probes),
    )


def refined(task: PastTask, current: Loaded, count: int) -> list[Example]:
    """The first probes of a bank as the latest model answers them; those without a complete answer are left out.

    Source: Huang et al. 2024, SSR: synthetic outputs are refined by the latest model.
    """
    if task.written_by == current.fingerprint:
        return list(task.probes[:count])
    unanswered = [_unanswered(probe) for probe in task.probes[:count]]
    labels = label(current.model, LocalEngine(current.model, current.tokenizer), task.interface, unanswered)
    return [own.example for own in labels if isinstance(own, Label)]


def _unanswered(probe: Example) -> Example:
    """The probe without its answer: the only choice of an open question is an earlier model's answer."""
    if isinstance(probe, Choice) and len(probe.choices) == 1:
        return dataclasses.replace(probe, choices=(), answer=0)
    return probe


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
