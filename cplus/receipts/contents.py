"""What a receipt holds: what a model could do before, what it can do after, and what was done in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field

from cplus.evaluation.requirements import Requirement
from cplus.evaluation.retention_acquisition import Kind
from cplus.receipts.summary import table

SetKind: TypeAlias = Literal["retention", "acquisition", "validation", "task", "external"]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Percent: TypeAlias = Annotated[float, Field(ge=0, le=100)]
Loss: TypeAlias = Annotated[float, Field(ge=0)]

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, revalidate_instances="always")


@dataclass(frozen=True, kw_only=True)
class ModelId:
    """A model's name and the hash of its weights."""

    __pydantic_config__ = _STRICT

    name: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class RowComparison:
    """One row before and after, in words a person can read; `kind` is None where no judge says what is right.

    `label` groups rows, such as the gold letter. Free-form rows have losses, each the mean over tokens: `nll_before`
    and `nll_after` of the given response, which has `tokens` tokens, and `answer_nll_before` and `answer_nll_after` of
    the answer that the model before gave.
    """

    __pydantic_config__ = _STRICT

    id: str
    kind: Kind | None
    input: str
    gold: str
    before: str
    after: str
    confidence_before: Share
    confidence_after: Share
    label: str | None = None
    tokens: Annotated[int, Field(ge=1)] | None = None
    nll_before: Loss | None = None
    nll_after: Loss | None = None
    answer_nll_before: Loss | None = None
    answer_nll_after: Loss | None = None


@dataclass(frozen=True, kw_only=True)
class RowSet:
    """Rows evaluated before and after, and their purpose.

    `retention` rows count for Retention, `acquisition` rows (those trained on) for Acquisition, `validation` rows are
    new rows held out of training, a whole `task` counts for both, `external` rows for neither: they are reported apart.
    `anchors` marks retention rows that the method was given, so that nobody reads them as held-out past rows. `judge`
    names the judge of free text; without one (None or `none`) free text has no outcomes, whatever its rows carry.
    """

    __pydantic_config__ = _STRICT

    name: str
    kind: SetKind
    interface: str
    rows: tuple[RowComparison, ...]
    judge: str | None = None
    anchors: bool = False

    @property
    def judged(self) -> bool:
        """Whether the rows have outcomes: multiple choice, or free text with a chosen judge."""
        return self.interface != "freeform" or self.judge not in (None, "none")

    @property
    def followed(self) -> bool:
        """Whether answers are the same, reworded or changed: free text without a judge that was not to be learned.

        Plain texts have no input, so there is no answer to follow.
        """
        return (
            not self.judged and self.kind not in ("acquisition", "validation") and any(row.input for row in self.rows)
        )


@dataclass(frozen=True, kw_only=True)
class Point:
    """An evaluation after an epoch; epoch 0 is the model before. Losses are means over all tokens.

    `validation` is Acquisition, and `validation_nll` the loss, on new rows held out of training. `divergence` is that
    of the model from its base on new rows.
    """

    __pydantic_config__ = _STRICT

    epoch: Annotated[float, Field(ge=0)]
    loss: Loss | None = None
    retention: Percent | None = None
    acquisition: Percent | None = None
    past_nll: Loss | None = None
    new_nll: Loss | None = None
    validation: Percent | None = None
    validation_nll: Loss | None = None
    divergence: Loss | None = None


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """Another finished run on the same rows: its curve and all its settings; the page shows those that differ."""

    __pydantic_config__ = _STRICT

    curve: tuple[Point, ...]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GateShare:
    """Share of the proposed update that the gate admitted in one layer.

    `admitted_share` counts coordinates, `energy_share` weighs them by their squared size.
    """

    __pydantic_config__ = _STRICT

    name: str
    coordinates: Annotated[int, Field(ge=1)]
    admitted_share: Share
    energy_share: Share | None = None


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The number of probes that are also in a file, word for word or nearly."""

    __pydantic_config__ = _STRICT

    name: str
    rows: int
    exact: int
    near: int


@dataclass(frozen=True, kw_only=True)
class SampleProbe:
    """One probe to read: what the frozen model wrote and what it answered."""

    __pydantic_config__ = _STRICT

    input: str
    answer: str
    confidence: Share


@dataclass(frozen=True, kw_only=True)
class BankAudit:
    """The part of a bank's audit that the receipt shows; `divergence` is None where the anchors are unknown."""

    __pydantic_config__ = _STRICT

    sha256: str
    probes: Annotated[int, Field(ge=1)]
    unique: int
    requests: int
    rejected: dict[str, int]
    confidence: dict[Literal["mean", "median", "p10"], Share]
    divergence: float | None
    overlaps: tuple[Overlap, ...] = ()
    sample: tuple[SampleProbe, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TunedSet:
    """What the tuned model of a repair reached on one set: percentages of judged rows, and the loss of free text."""

    __pydantic_config__ = _STRICT

    name: str
    right: Percent | None = None
    retention: Percent | None = None
    acquisition: Percent | None = None
    nll: Loss | None = None


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A repair: the tuned model between `before` and `after`, and how many of the weights it moved were reset."""

    __pydantic_config__ = _STRICT

    tuned: ModelId
    undone: Annotated[int, Field(ge=1)]
    moved: Annotated[int, Field(ge=1)]
    sets: tuple[TunedSet, ...]


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Everything the page shows. `created` is a date in ISO form, `notes` are sentences a reader must know.

    `curve` is the run's own, `comparisons` those of other methods on the same rows, by method; `followed` is the number
    of rows behind each point of the curve, by set. `noise_floor` is the difference in mean loss per token between the
    model's own answers that sampling alone explains, in nats. `repair` is there where `after` is a repaired model; the
    tuned model is neither `before` nor `after`. `cost` is `RunResult.cost` with `seconds` and `extra_bytes`, or as much
    of it as is known.
    """

    __pydantic_config__ = _STRICT

    title: str
    created: str
    before: ModelId
    after: ModelId
    method: str | None = None
    sets: Annotated[tuple[RowSet, ...], Field(min_length=1)]
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    curve: tuple[Point, ...] = ()
    comparisons: dict[str, ComparedRun] = field(default_factory=dict)
    followed: dict[str, int] = field(default_factory=dict)
    noise_floor: Loss | None = None
    gate: tuple[GateShare, ...] = ()
    audit: BankAudit | None = None
    repair: Repair | None = None
    cost: dict[str, int | float] = field(default_factory=dict)
    requirements: tuple[Requirement, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        sets = ", ".join(f"{own.name} {len(own.rows)}" for own in self.sets)
        return f"Receipt({self.title!r}: {self.before.name} to {self.after.name}; rows: {sets})"

    def _repr_html_(self) -> str:
        """What a notebook shows: both models, and each set's outcomes; the page has every row."""
        rows = [(own.name, own.kind, *(f"{count:,}" for count in _outcomes(own))) for own in self.sets]
        models = f"<b>{escape(self.title)}</b><br>{escape(self.before.name)} to {escape(self.after.name)}"
        return f"<div>{models}{table(('rows', 'for', *OUTCOMES), rows)}</div>"


OUTCOMES = ("all", "kept", "lost", "gained", "still wrong", "not judged")


def _outcomes(own: RowSet) -> list[int]:
    """The number of rows with each outcome; free text without a judge has none."""
    kinds = [row.kind if own.judged else None for row in own.rows]
    return [len(kinds), *(kinds.count(kind) for kind in ("kept", "lost", "gained", "still_wrong", None))]
