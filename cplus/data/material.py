"""The rows of a training, by what they are for: new rows to learn, and each past task's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from cplus.data.encoded import Encoded

Rows: TypeAlias = Literal["new", "anchors", "probes", "synthetic", "constant", "balanced"]
"""The kinds of rows."""
BANK: frozenset[Rows] = frozenset({"probes", "synthetic", "constant", "balanced"})
"""The kinds of rows that come from the bank."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """The rows of one past task.

    `synthetic` are probes answered again by the latest model. `constant` and `balanced` are controls: probes that all
    have the same answer, and probes in which no answer has more than its even share.
    """

    name: str
    anchors: Sequence[Encoded] = ()
    probes: Sequence[Encoded] = ()
    synthetic: Sequence[Encoded] = ()
    constant: Sequence[Encoded] = ()
    balanced: Sequence[Encoded] = ()

    def rows(self, kind: Rows) -> Sequence[Encoded]:
        """The rows of one kind."""
        assert kind != "new", "new rows belong to no past task"
        rows: Sequence[Encoded] = getattr(self, kind)
        return rows


@dataclass(frozen=True, kw_only=True)
class Material:
    """New data to learn and the past tasks to keep."""

    new: Sequence[Encoded]
    past: tuple[Past, ...] = ()
    choices: Mapping[Encoded, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """The tokens of every choice of a new row, its target among them, where the row has choices."""

    def __post_init__(self) -> None:
        if not self.new:
            raise ValueError("there is no new data to learn: expected at least one new row, got none")

    def rows(self, kind: Rows) -> list[Encoded]:
        """The rows of one kind over all past tasks."""
        return list(self.new) if kind == "new" else [row for past in self.past for row in past.rows(kind)]
