"""Rows by the part they play, and as the tokens that training sees."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from cplus.core.losses import left_padded
from cplus.core.rows import Encoded
from cplus.data.examples import Choice, Example, FreeForm, Prediction
from cplus.data.interfaces import Interface
from cplus.methods.table import Material, Method, Past
from cplus.models import Loaded
from cplus.models.scoring import scored
from cplus.probes.labels import Label, label
from cplus.probes.settings import input_key

# Rows by the part they play, each group with the interface through which the model sees it.


Part: TypeAlias = Literal["acquisition", "validation", "retention", "task", "external"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows with one interface; `part` is the figure they count for."""

    name: str
    part: Part
    interface: Interface
    examples: tuple[Example, ...]
    known: tuple[Prediction, ...] = ()
    """The base model's answers, where they are already known."""
    note: str = ""
    """What was done to rows that were too long."""
    max_new_tokens: int | None = None
    """Maximum length of an answer in free text, where these rows have their own."""
    by_base: bool = False
    """Whether the responses are the base model's own answers, so that it need not answer again."""

    @property
    def closed(self) -> bool:
        """Whether the answers are choices; else they are free text."""
        return self.interface.name != "freeform"

    @property
    def texts(self) -> bool:
        """Whether the rows are plain texts, which have a loss and no answer."""
        return all(isinstance(example, FreeForm) and example.is_text for example in self.examples)

    def encoded(self) -> list[Encoded]:
        """The rows as tokens."""
        return [self.interface.encode(example) for example in self.examples]

    def drawn(self, count: int, seed: int) -> Group:
        """At most `count` rows, drawn by the seed, in their own order."""
        if len(self.examples) <= count:
            return self
        chosen = set(random.Random(f"{seed}/{self.name}").sample(range(len(self.examples)), count))
        examples = tuple(example for i, example in enumerate(self.examples) if i in chosen)
        ids = {example.id for example in examples}
        return replace(self, examples=examples, known=tuple(p for p in self.known if p.id in ids))


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of new rows: its weight, its rows, those trained on, and how many an epoch uses with copies."""

    name: str
    weight: float
    rows: int
    trained: int
    per_epoch: int


@dataclass(frozen=True, kw_only=True)
class Rows:
    """All rows of a job, read before the first update."""

    new: Group
    anchors: Group | None
    past: Group | None
    validation: Group | None = None
    """New rows held out of training."""
    external: tuple[Group, ...] = ()
    kept: tuple[Group, ...] = ()
    """The anchors of earlier jobs, each a past task of its own."""
    notes: tuple[str, ...] = ()
    copies: tuple[Example, ...] = ()
    """New rows that an epoch uses again, where their file has a weight above 1."""
    sources: tuple[Source, ...] = ()
    """The files of the new rows."""

    @property
    def trained(self) -> Group:
        """The new rows with their copies: what one epoch trains on."""
        return replace(self.new, examples=(*self.new.examples, *self.copies)) if self.copies else self.new

    @property
    def groups(self) -> tuple[Group, ...]:
        """Every group there is."""
        some = filter(None, (self.anchors, self.past, self.validation))
        return (self.trained, *some, *self.external, *self.kept)

    def evaluated(self, max_free_text: int, seed: int) -> tuple[Group, ...]:
        """The groups evaluated before and after: new rows, past rows or else the anchors, and the external tasks."""
        kept = self.past or self.anchors
        groups = [self.new, *filter(None, (self.validation, kept)), *self.external]
        return tuple(group if group.closed else group.drawn(max_free_text, seed) for group in groups)


def overlap(some: Group, others: Group) -> int:
    """The number of rows of one group whose input is also in the other."""
    known = {input_key(example, options=False) for example in others.examples}
    return sum(input_key(example, options=False) in known for example in some.examples)


# From rows to material: new rows and every past task, as the tokens that training sees.


CLUSTERS = 20
"""Clusters of synthetic rows (Huang et al. 2024), or as many as rows are kept where these are fewer."""
_ROUNDS = 50


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
        rows = {"anchors": task.anchors, "probes": task.probes}
        if "synthetic" in method.needs:
            rows["synthetic"] = tuple(refined(task, current, share))
        encoded = {kind: [task.interface.encode(example) for example in own] for kind, own in rows.items()}
        past.append(Past(name=task.name, **encoded))
    return Material(new=new, past=tuple(past), choices=dict(zip(new, choices, strict=True)))


def refined(task: PastTask, current: Loaded, count: int) -> list[Example]:
    """Typical probes of a bank as the latest model answers them; those without a complete answer are left out.

    Source: Huang et al. 2024, SSR: rows near the centres of clusters are kept, and the latest model refines them.
    """
    probes = list(task.probes)
    if count < len(probes):
        rows = [task.interface.encode(probe) for probe in probes]
        probes = [probes[i] for i in typical(mean_states(current.model, rows), count)]
    if task.written_by == current.fingerprint:
        return probes
    # The only choice of an open question is an earlier model's answer.
    unanswered = [
        replace(probe, choices=(), answer=0) if isinstance(probe, Choice) and len(probe.choices) == 1 else probe
        for probe in probes
    ]
    labels = label(current.model, task.interface, unanswered)
    return [own.example for own in labels if isinstance(own, Label)]


@torch.inference_mode()
def mean_states(model: Any, rows: Sequence[Encoded]) -> Tensor:
    """Each row's last hidden state, averaged over its tokens."""
    states = torch.empty(len(rows), model.config.get_text_config().hidden_size)
    for batch in scored(model, [len(row) for row in rows], [1] * len(rows), "clustering"):
        inputs = left_padded([(*rows[i].prompt, *rows[i].target) for i in batch], model.device)
        mask = inputs["attention_mask"][..., None]
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state.float()
        states[batch] = ((hidden * mask).sum(1) / mask.sum(1)).cpu()
    return states


def typical(points: Tensor, count: int) -> list[int]:
    """The points nearest to the centres of their clusters, in order; each cluster has as many while it lasts.

    >>> typical(torch.tensor([[0.0], [1.0], [5.0], [50.0], [53.0], [51.0]]), 2)
    [1, 5]
    """
    points, clusters = points.double(), min(CLUSTERS, count)
    centres = points[:1]
    while len(centres) < clusters:  # from points far apart: no draw, and no two centres in one dense cluster
        centres = torch.cat([centres, points[torch.cdist(points, centres).amin(1).argmax()][None]])
    for _ in range(_ROUNDS):
        own = torch.cdist(points, centres).argmin(1)
        centres = torch.stack([points[own == i].mean(0) if i in own else centres[i] for i in range(clusters)])
    nearest = (points - centres[own]).norm(dim=1).argsort(stable=True).tolist()
    turns = zip_longest(*([i for i in nearest if own[i] == cluster] for cluster in range(clusters)))
    return sorted([i for turn in turns for i in turn if i is not None][:count])
