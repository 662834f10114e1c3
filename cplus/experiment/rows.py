"""Rows by the part they play, each group with the interface through which the model sees it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from cplus.data.encoded import Encoded
from cplus.data.examples import Example, FreeForm
from cplus.data.predictions import Prediction
from cplus.interfaces import Interface
from cplus.probes.texts import input_key

Part: TypeAlias = Literal["acquisition", "validation", "retention", "external"]


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
