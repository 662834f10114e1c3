"""What a receipt holds: what a model could do before, what it can do after, and what was done in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from string import ascii_uppercase
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field

from cplus.data.examples import Choice, Example, Prediction
from cplus.evaluation.changes import Kind, flips
from cplus.evaluation.requirements import Requirement, sentence

# A small table for a notebook: what was kept and learned, and where to read on.


_CELL = "padding:2px 10px;text-align:{}"


def of_figures(headline: str, figures: Mapping[str, Any], links: Mapping[str, str]) -> str:
    """The figures of a finished job: its headline, each set of rows before and after, requirements, and its files."""
    rows = [row for own in figures["sets"] for row in _set(own)]
    files = " · ".join(f"{escape(name)}: <code>{escape(path)}</code>" for name, path in links.items())
    said = "".join(f"<br>{escape(sentence(found))}" for found in figures["requirements"])
    shown = table(("rows", "", "before", "after"), rows)
    return f"<div><b>{escape(headline)}</b>{said}{shown}<small>{files}</small></div>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table; all text is escaped, and columns after the first two are numbers.

    >>> table(("a", "b"), [("<x>", "1")]).count("&lt;x&gt;")
    1
    """
    lines = [_summary_row("th", head), *(_summary_row("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _summary_row(tag: str, cells: Sequence[str]) -> str:
    sides = ["left" if column < 2 else "right" for column in range(len(cells))]
    shown = (
        f'<{tag} style="{_CELL.format(side)}">{escape(text)}</{tag}>' for side, text in zip(sides, cells, strict=True)
    )
    return f"<tr>{''.join(shown)}</tr>"


def _set(own: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A set's share of right answers, and its loss, where each was measured."""
    name = f"{own['name']} ({own['rows']:,})"
    lines: list[tuple[str, ...]] = []
    if own["before"] and own["after"]:
        lines.append((name, "right", *(f"{own[when]['percent']:.1f} %" for when in ("before", "after"))))
    if own["nll"]:
        lines.append((name, "loss per token", *(f"{own['nll'][when]:.3f}" for when in ("before", "after"))))
    return lines


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
        """Whether answers are the same or changed: free text without a judge that was not to be learned.

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


# From two models' answers to the rows of a receipt, in words a person can read.


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The mean loss per token of one text under the model before and the model after, and its number of tokens."""

    before: float
    after: float
    tokens: int


def rows(
    examples: Sequence[Example],
    before: Sequence[Prediction],
    after: Sequence[Prediction],
    *,
    interface: str,
    losses: Sequence[Losses] = (),
    answers: Sequence[Losses | None] = (),
) -> tuple[RowComparison, ...]:
    """The comparisons of these examples in their order.

    Free-form rows add `losses`, one per example, of the given responses, and `answers`, one per example, of the answers
    that the model before gave (None for an empty answer).
    """
    judged = all(prediction.correct is not None for prediction in (*before, *after))
    kinds: dict[str, Kind] = {flip.id: flip.kind for flip in flips(before, after)} if judged else {}
    was, now = ({prediction.id: prediction for prediction in some} for some in (before, after))
    known: Sequence[Losses | None] = losses or [None] * len(examples)
    own = answers or [None] * len(examples)
    return tuple(
        _row(example, kinds.get(example.id), was[example.id], now[example.id], interface, loss, answer)
        for example, loss, answer in zip(examples, known, own, strict=True)
    )


def _row(
    example: Example,
    kind: Kind | None,
    was: Prediction,
    now: Prediction,
    interface: str,
    loss: Losses | None,
    answer: Losses | None,
) -> RowComparison:
    gold = _answer(example, example.answer, interface) if isinstance(example, Choice) else example.response
    return RowComparison(
        id=example.id,
        kind=kind,
        input=_input(example, interface),
        gold=gold,
        before=_answer(example, was.answer, interface),
        after=_answer(example, now.answer, interface),
        confidence_before=min(was.confidence, 1.0),  # the exponential of a rounded 0 may be an ulp above 1
        confidence_after=min(now.confidence, 1.0),
        # Elsewhere the model never sees a letter, so the position of the right choice means nothing.
        label=ascii_uppercase[example.answer] if isinstance(example, Choice) and interface == "letter" else None,
        tokens=loss.tokens if loss else None,
        nll_before=loss.before if loss else None,
        nll_after=loss.after if loss else None,
        answer_nll_before=answer.before if answer else None,
        answer_nll_after=answer.after if answer else None,
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
