"""What a receipt holds: what a model could do before, what it can do after, and what was done in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field

from cplus.data.examples import Choice, Example
from cplus.evaluation.changes import Kind, flips
from cplus.evaluation.requirements import Requirement

if TYPE_CHECKING:
    from cplus.training.measure import GroupAnswers
    from cplus.training.rows import Group

SetKind: TypeAlias = Literal["retention", "acquisition", "validation", "task", "external", "ability"]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Percent: TypeAlias = Annotated[float, Field(ge=0, le=100)]
Loss: TypeAlias = Annotated[float, Field(ge=0)]


class _Strict:
    """Values are checked when a record is written and when it is read."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, revalidate_instances="always")


@dataclass(frozen=True, kw_only=True)
class ModelId(_Strict):
    """A model's name and the hash of its weights."""

    name: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class RowComparison(_Strict):
    """One row before and after, in words a person can read; `kind` is None where no judge says what is right.

    An answer is None where the model was not asked.  `nll_before` and
    `nll_after` are the losses of a given response in free text, each the mean over its `tokens`. Of the requests of an
    ability, `ended_before` and `ended_after` say whether the answer ended by itself.
    """

    id: str
    kind: Kind | None
    input: str
    gold: str
    before: str | None
    after: str | None
    confidence_before: Share
    confidence_after: Share
    tokens: Annotated[int, Field(ge=1)] | None = None
    nll_before: Loss | None = None
    nll_after: Loss | None = None
    ended_before: bool | None = None
    ended_after: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RowSet(_Strict):
    """Rows evaluated before and after, and their purpose.

    `retention` rows count for Retention, `acquisition` rows (those trained on) for Acquisition, `validation` rows are
    new rows held out of training, a whole `task` counts for both, `external` rows for neither: they are reported apart.
    The requests of an `ability` are what the verdict is made of.
    `anchors` marks retention rows that the method was given, so that nobody reads them as held-out past rows. `judge`
    names the judge of free text; without one (None or `none`) free text has no outcomes, whatever its rows carry.
    """

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


@dataclass(frozen=True, kw_only=True)
class Point(_Strict):
    """An evaluation after an epoch; epoch 0 is the model before. Losses are means over all tokens.

    `validation` is Acquisition, and `validation_nll` the loss, on new rows held out of training. `divergence` is that
    of the model from its base on new rows.
    """

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
class Divergence(_Strict):
    """KL from the model before, in nats per token, at held-out rows, and what rounding its weights alone gives."""

    rows: Annotated[int, Field(ge=1)]
    after: Loss
    bfloat16: Loss
    q8_0: Loss


@dataclass(frozen=True, kw_only=True)
class Beside(_Strict):
    """Plain fine-tuning of the same base on the same rows, up to the same `level` if that was `reached`.

    The level is the loss of held-out, else trained, new rows, and of multiple choice their Acquisition in percent.
    """

    method: str
    level: Annotated[float, Field(ge=0)]
    reached: bool
    updates: Annotated[int, Field(ge=0)]
    seconds: Annotated[float, Field(ge=0)]
    sets: tuple[RowSet, ...]
    divergence: Divergence | None = None


@dataclass(frozen=True, kw_only=True)
class GateShare(_Strict):
    """Share of the proposed update that the gate admitted in one layer.

    `admitted_share` counts coordinates, `energy_share` weighs them by their squared size.
    """

    name: str
    coordinates: Annotated[int, Field(ge=1)]
    admitted_share: Share
    energy_share: Share | None = None


@dataclass(frozen=True, kw_only=True)
class TunedSet(_Strict):
    """What the tuned model of a repair reached on one set: percentages of judged rows, and the loss of free text."""

    name: str
    right: Percent | None = None
    retention: Percent | None = None
    acquisition: Percent | None = None
    nll: Loss | None = None


@dataclass(frozen=True, kw_only=True)
class Repair(_Strict):
    """A repair: the tuned model between `before` and `after`, and how many of the weights it moved were reset."""

    tuned: ModelId
    undone: Annotated[int, Field(ge=1)]
    moved: Annotated[int, Field(ge=1)]
    sets: tuple[TunedSet, ...]


@dataclass(frozen=True, kw_only=True)
class Receipt(_Strict):
    """Everything the page shows. `created` is a date in ISO form, `notes` are sentences a reader must know.

    `followed` is the number of rows behind each point of the curve, by set. `beside` is plain fine-tuning, where the
    job compared itself with it. `repair` is there where `after` is a repaired model; the tuned model is neither
    `before` nor `after`. `cost` is `RunResult.cost` with `seconds` and `extra_bytes`, or as much of it as is known.
    """

    title: str
    created: str
    before: ModelId
    after: ModelId
    method: str | None = None
    sets: Annotated[tuple[RowSet, ...], Field(min_length=1)]
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    curve: tuple[Point, ...] = ()
    followed: dict[str, int] = field(default_factory=dict)
    divergence: Divergence | None = None
    beside: Beside | None = None
    gate: tuple[GateShare, ...] = ()
    audit: dict[str, Any] | None = None
    """The part of a bank's audit that the page shows, as `bank_audit` gives it."""
    repair: Repair | None = None
    cost: dict[str, int | float] = field(default_factory=dict)
    requirements: tuple[Requirement, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        sets = ", ".join(f"{own.name} {len(own.rows)}" for own in self.sets)
        return f"Receipt({self.title!r}: {self.before.name} to {self.after.name}; rows: {sets})"


# From two models' answers to the rows of a receipt, in words a person can read.


def compare(group: Group, before: GroupAnswers, after: GroupAnswers, *, judge: str) -> RowSet:
    """The rows of a group as two models answered them: of a job, a repair, a check or any two models."""
    answers = (*before.predictions, *after.predictions)
    judged = all(prediction.correct is not None for prediction in answers)
    kinds: dict[str, Kind] = dict(flips(before.predictions, after.predictions)) if judged else {}
    was, now = ({p.id: p for p in own.predictions} for own in (before, after))
    interface, unknown = group.interface.name, [None] * len(group.examples)
    scores = (before.scores or unknown, after.scores or unknown)
    rows = []
    for example, old, new in zip(group.examples, *scores, strict=True):
        row = RowComparison(
            id=example.id,
            kind=kinds.get(example.id),
            input=_input(example, interface),
            gold=_answer(example, example.answer, interface) if isinstance(example, Choice) else example.response,
            before=_answer(example, was[example.id].answer, interface) if example.id in was else None,
            after=_answer(example, now[example.id].answer, interface) if example.id in now else None,
            # The exponential of a rounded 0 may be above 1.
            confidence_before=min(was[example.id].confidence, 1.0) if example.id in was else 0.0,
            confidence_after=min(now[example.id].confidence, 1.0) if example.id in now else 0.0,
            tokens=old.num_tokens if old else None,
            nll_before=max(0.0, -old.mean) if old and new else None,  # a likelihood of 1 may round to a loss below 0
            nll_after=max(0.0, -new.mean) if old and new else None,
        )
        rows.append(row)
    return RowSet(
        name=group.name,
        kind=group.part,
        interface=interface,
        rows=tuple(rows),
        judge=None if group.closed else judge,
        anchors=group.name == "anchors",
    )


def _input(example: Example, interface: str) -> str:
    """The model's input, with the options it could choose from."""
    if isinstance(example, Choice):
        options = range(len(example.choices)) if len(example.choices) > 1 else ()
        return "\n".join([example.question, *(f"  {_answer(example, option, interface)}" for option in options)])
    if len(example.messages) == 1:
        return example.messages[0].content
    return "\n".join(f"{message.role}: {message.content}" for message in example.messages)


def _answer(example: Example, answer: int | str, interface: str) -> str:
    """An answer in words; an option has its letter before it where the interface asks for letters."""
    if isinstance(answer, str) or not isinstance(example, Choice):
        return str(answer)
    text = example.choices[answer]
    return f"{ascii_uppercase[answer]}: {text}" if interface == "letter" else text
