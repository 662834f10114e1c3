"""Requirements on a receipt's figures: read from text, checked before training for sense, judged after it.

A share (`retention>=0.9`, `acquisition>=0.8`) is held against the lower end of its 95 % interval. A loss in nats per
token (`past-loss<=+0.05`, the rise of the past answers' loss; `new-loss<=1.0`, the new answers' loss after training) is
held against the upper end. The change of an ability in points of its requests (`tools>=-5`) is held against the share
that may have been lost, at 95 %: no gained answer makes up for a lost one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ConfigDict

from cplus.evaluation.abilities import ERROR, MEASURED, STOPPING, requests
from cplus.evaluation.statistics import Rate, mcnemar_interval

_SHARES, _LOSSES, ABILITY = ("retention", "acquisition"), ("past-loss", "new-loss"), (*MEASURED, STOPPING)
_TEXT = re.compile(r"([a-z-]+)\s*(>=|<=)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)")
EXPECTED = (
    "retention>=SHARE or acquisition>=SHARE with a share from 0 to 1, past-loss<=RISE or new-loss<=LOSS in nats, or "
    "ABILITY>=-POINTS with an ability such as tools"
)


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A figure and its bound: `at_least` for a share or points, `at_most` for a loss; the other one is None."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, revalidate_instances="always")

    metric: str
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if self.metric in _LOSSES:
            right = self.at_least is None and self.at_most is not None and math.isfinite(self.at_most)
        else:
            low, high = (-100, 0) if self.metric in ABILITY else (0, 1)
            right = self.at_most is None and self.at_least is not None and low <= self.at_least <= high
            right = right and self.metric in (*_SHARES, *ABILITY)
        if not right or (self.metric == "new-loss" and self.bound < 0):
            found = self.at_least if self.at_most is None else self.at_most
            sign = "<=" if self.at_least is None else ">="
            raise ValueError(f"expected {EXPECTED}, got '{self.metric}{sign}{found:g}'")

    @property
    def bound(self) -> float:
        """The number required, whichever side it bounds."""
        found = self.at_least if self.at_most is None else self.at_most
        assert found is not None
        return found

    def __str__(self) -> str:
        if self.metric in _LOSSES:
            return f"{self.metric}<={self.bound:{'+' if self.metric == 'past-loss' else ''}g}"
        return f"{self.metric}>={self.bound:g}"


def parse(text: str) -> Requirement:
    """Read `retention>=0.9` or `past-loss<=+0.05`.

    >>> str(parse("retention >= 0.9")), str(parse("past-loss<=0.05"))
    ('retention>=0.9', 'past-loss<=+0.05')
    """
    match = _TEXT.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"expected {EXPECTED}, got {text!r}")
    number, most = float(match[3]), match[2] == "<="
    return Requirement(metric=match[1], at_least=None if most else number, at_most=number if most else None)


P = TypeVar("P", bound=Any)


def past_parts(parts: Sequence[P]) -> list[P]:
    """The sets that Retention and the past loss are measured on: held-out past rows, else the anchors."""
    found = [own for own in parts if own.kind in ("retention", "task")]
    return [own for own in found if not own.anchors] or found


def new_parts(parts: Sequence[P]) -> list[P]:
    """The sets that Acquisition and the new loss are measured on: the rows trained on, or a whole task."""
    return [own for own in parts if own.kind in ("acquisition", "task")]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of a set before training: `right` of its `rows` were right, None where no judge says so.

    `scored` is the number of rows whose given response has a loss: those in free text.
    """

    kind: str
    rows: int
    right: int | None = None
    scored: int = 0
    anchors: bool = False


def require_possible(requirements: Sequence[Requirement], parts: Sequence[Measured]) -> None:
    """Refuse a requirement by which no result could be judged, or that none could meet, before any work is done."""
    for requirement in requirements:
        if (problem := possible(requirement, parts)) is not None:
            raise ValueError(f"{requirement} {problem}")


def possible(requirement: Requirement, parts: Sequence[Measured]) -> str | None:
    """Why no result could be judged by the requirement, as the rest of a sentence; None if it can be met."""
    if requirement.metric in ABILITY:
        count = len(requests(requirement.metric)) if requirement.metric in MEASURED else math.inf
        best = _points(0, count)
        if best >= requirement.bound:
            return None
        return (
            f"cannot be met: it is held against the lower 95 % bound, which is {best:.1f} points when none of {count} "
            "answers is lost; require less"
        )
    past, loss = requirement.metric in ("retention", "past-loss"), requirement.metric in _LOSSES
    own = past_parts(parts) if past else new_parts(parts)
    whose, share, other = (
        ("past", "retention", "past-loss<=+0.05") if past else ("new", "acquisition", "new-loss<=LOSS")
    )
    if not own:
        return f"needs {whose} rows, and there are none; give some, or leave the requirement out"
    scored = sum(part.scored for part in own)
    if loss and scored == 0:
        return f"needs {whose} rows in free text, and these are multiple choice; require {share}>=SHARE instead"
    if loss:
        return f"needs an interval, and there is one {whose} row; give at least two" if scored == 1 else None
    judged = [(part.rows, part.right) for part in own if part.right is not None]
    if not judged:
        return (
            "needs judged answers, and no judge was chosen for free text; choose one with --judge, or require "
            f"{other} instead"
        )
    rows, right = sum(count for count, _ in judged), sum(count for _, count in judged)
    count, state = (right, "correctly") if past else (rows - right, "incorrectly")
    if not count:
        return f"cannot be judged: the base model answered none of {rows} rows {state}; give other rows"
    best = Rate(count, count).interval()[0] / 100
    if best >= requirement.bound:
        return None
    return (
        f"cannot be met: it is held against the lower 95 % bound, which is {best:.3f} when all {count} rows are right; "
        "give more rows or require less"
    )


def judged(requirement: Requirement, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the figures meet the requirement; a figure that was not measured meets nothing.

    `figures` are those of a receipt: `retention` and `acquisition` as rates, `free` with the losses.
    """
    bound = _bound(requirement, figures)
    limit = requirement.bound
    met = bound is not None and (bound >= limit if requirement.at_most is None else bound <= limit)
    return {
        "metric": requirement.metric,
        "at_least": requirement.at_least,
        "at_most": requirement.at_most,
        "bound": bound,
        "met": met,
    }


def _points(lost: int, rows: float) -> float:
    """The lower bound of the change where so many answers were lost.

    >>> round(_points(0, 64), 2), round(_points(2, 64), 2)
    (-4.57, -9.51)
    """
    return -mcnemar_interval(lost, 0, int(rows), ERROR)[2] if math.isfinite(rows) else 0.0


def _bound(requirement: Requirement, figures: Mapping[str, Any]) -> float | None:
    if requirement.metric in ABILITY:
        own = [one for one in figures["lines"] if one["name"] == requirement.metric]
        judged = [one for one in own if one["verdict"] != "not judged"]
        return _points(judged[0]["lost"], judged[0]["rows"]) if judged else None
    if requirement.metric not in _LOSSES:
        rate = figures[requirement.metric]
        return None if rate is None else float(rate["low"] / 100)
    part = figures["free"]["past" if requirement.metric == "past-loss" else "new"]
    loss = None if part is None else part["loss"]
    if loss is None:
        return None
    found = loss["high"] if requirement.metric == "past-loss" else loss["after_high"]
    return None if found is None else float(found)


def sentence(found: Mapping[str, Any]) -> str:
    """One requirement as `judged` gives it, in words.

    >>> sentence({"metric": "past-loss", "at_least": None, "at_most": 0.05, "bound": 0.021, "met": True})
    'Met: past-loss at most +0.05; its upper 95 % bound is +0.021.'
    """
    sign = "+" if found["metric"] == "past-loss" else ""
    side, words, limit = ("lower", "at least", found["at_least"])
    if found["at_most"] is not None:
        side, words, limit = ("upper", "at most", found["at_most"])
    points, places = (" points", 1) if found["metric"] in ABILITY else ("", 3)
    value = f"its {side} 95 % bound is {found['bound'] or 0:{sign}.{places}f}"
    bound = "no row measures it" if found["bound"] is None else value
    return f"{'Met' if found['met'] else 'NOT MET'}: {found['metric']} {words} {limit:{sign}g}{points}; {bound}."
