"""The record of a receipt: what a model could do before, what it can do after, and what was done in between."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from cplus import files
from cplus.evaluation.outcomes import Kind
from cplus.report.measures import figures

SCHEMA = 1

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

    def to_json(self) -> dict[str, Any]:
        """The record as plain values, with the figures its rows give and the hash of it all."""
        _check(self)
        body = {"schema": SCHEMA, **asdict(self), "figures": figures(self)}
        body = json.loads(files.canonical_json(body))  # tuples become lists, as they will be read
        return {**body, "sha256": files.fingerprint(body)}

    @classmethod
    def from_json(cls, raw: Any, *, where: str = "the receipt") -> Receipt:
        """Read a record made by `to_json`; one that was altered, or that another version wrote, is refused."""
        if not isinstance(raw, Mapping) or raw.get("schema") != SCHEMA:
            raise ValueError(f"{where}: expected a receipt of schema {SCHEMA}; it was written by another version")
        body = {key: value for key, value in raw.items() if key != "sha256"}
        if raw.get("sha256") != files.fingerprint(body):
            raise ValueError(
                f"{where}: the record was altered: its content has the hash {files.fingerprint(body)[:16]}, "
                f"but it was written with {str(raw.get('sha256'))[:16]}; make the receipt again"
            )
        fields = {key: value for key, value in body.items() if key not in ("schema", "figures")}
        try:
            receipt = TypeAdapter(Receipt).validate_json(files.canonical_json(fields))
        except ValidationError as error:
            raise ValueError(f"{where}: {_first(error)}") from error
        _check(receipt)
        if not _alike(body["figures"], json.loads(files.canonical_json(figures(receipt)))):
            raise ValueError(f"{where}: its figures do not follow from its rows; make the receipt again")
        return receipt


def _check(receipt: Receipt) -> None:
    """Refuse values that could not be read again, names and ids that stand for two things."""
    try:
        TypeAdapter(Receipt).validate_python(receipt)
    except ValidationError as error:
        raise ValueError(f"the receipt: {_first(error)}") from error
    groups = {"set names": [own.name for own in receipt.sets]}
    groups |= {f"ids in set {own.name!r}": [row.id for row in own.rows] for own in receipt.sets}
    for what, names in groups.items():
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(f"the receipt: expected different {what}, got {twice[0]!r} more than once")


def _alike(left: Any, right: Any) -> bool:
    """Equal, up to what another build of the statistics library may round."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_alike(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
    return bool(left == right)


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.60}"
