"""What a receipt holds: what a model could do before, what it can do after, and what was done in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field

from cplus.evaluation.outcomes import Kind

SetKind: TypeAlias = Literal["retention", "acquisition", "task", "external"]
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
class Row:
    """One row before and after, in words a person can read; `kind` is None where nothing says what is right.

    `label` groups rows, such as the gold letter. `nll_before` and `nll_after` are the mean loss a token of the gold
    response, `tokens` their number: free-form rows have them.
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


@dataclass(frozen=True, kw_only=True)
class RowSet:
    """Rows asked before and after, and what they are there for.

    `retention` rows count for Retention (past rows, or the anchors alone), `acquisition` rows for Acquisition (the
    rows trained on), a whole `task` for both, `external` rows for neither: they are reported apart.
    """

    __pydantic_config__ = _STRICT

    name: str
    kind: SetKind
    interface: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was known after an epoch; epoch 0 is the model before."""

    __pydantic_config__ = _STRICT

    epoch: Annotated[float, Field(ge=0)]
    loss: Loss | None = None
    retention: Percent | None = None
    acquisition: Percent | None = None
    past_nll: Loss | None = None
    new_nll: Loss | None = None


@dataclass(frozen=True, kw_only=True)
class GateShare:
    """How much of the proposed update the gate let through in one layer.

    `admitted_share` counts coordinates, `energy_share` weighs them by their squared size.
    """

    __pydantic_config__ = _STRICT

    name: str
    coordinates: Annotated[int, Field(ge=1)]
    admitted_share: Share
    energy_share: Share | None = None


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How many probes stand in a file, word for word or nearly."""

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
    """What a reader of the receipt needs of a bank's audit; `divergence` is None where the anchors are unknown."""

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
class Requirement:
    """What the user demanded: the lower 95 % bound of a figure is at least this share."""

    __pydantic_config__ = _STRICT

    metric: Literal["retention", "acquisition"]
    at_least: Share


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Everything the page shows. `created` is a date in ISO form, `notes` are sentences a reader must know.

    `curve` is the run's own, `comparisons` those of other methods on the same rows, by method. `cost` is
    `RunResult.cost` with `seconds` and `extra_bytes`, or as much of it as is known.
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
    comparisons: dict[str, tuple[Point, ...]] = field(default_factory=dict)
    gate: tuple[GateShare, ...] = ()
    audit: BankAudit | None = None
    cost: dict[str, int | float] = field(default_factory=dict)
    requirements: tuple[Requirement, ...] = ()
    notes: tuple[str, ...] = ()
