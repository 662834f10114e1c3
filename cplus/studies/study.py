"""What a study is: a question, the runs that answer it, the answer computed from them, and the paper's own numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from cplus.evaluate.statistics import Estimate
from cplus.records import RunResult, RunSpec, SequenceResult, SequenceSpec
from cplus.studies.scales import Scale

Spec: TypeAlias = RunSpec | SequenceSpec
Result: TypeAlias = RunResult | SequenceResult

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a study's table: what it is of, and its figures over the seeds."""

    at: Mapping[str, Any]
    figures: Mapping[str, Estimate]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of the paper as a difference that should be above 0, paired over the seeds; None: not run."""

    says: str
    margin: Estimate | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The difference's 95 % interval by Student's t; None for fewer than two seeds."""
        if self.margin is None or self.margin.error is None:
            return None
        half = _T95[min(self.margin.count - 1, len(_T95)) - 1] * self.margin.error
        return self.margin.mean - half, self.margin.mean + half

    @property
    def verdict(self) -> str:
        """`holds` or `fails` where the interval leaves 0 out, else `unclear`; `not run` without both sides.

        >>> Claim(says="", margin=Estimate(3.0, 0.5, 5)).verdict
        'holds'
        """
        if self.margin is None:
            return "not run"
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return "unclear"
        return "holds" if self.margin.mean > 0 else "fails"

    def row(self) -> dict[str, Any]:
        """The JSON row."""
        margin = None if self.margin is None else asdict(self.margin)
        return {"says": self.says, "margin": margin, "interval": self.interval, "verdict": self.verdict}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A study's table, its claims, and the answer in one sentence."""

    rows: tuple[Row, ...]
    answer: str
    claims: tuple[Claim, ...] = ()

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "answer": self.answer,
            "claims": [claim.row() for claim in self.claims],
            "rows": [
                {"at": dict(row.at), "figures": {name: asdict(found) for name, found in row.figures.items()}}
                for row in self.rows
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Published:
    """The paper's numbers for one table or figure: what each is of, and its value."""

    where: str
    numbers: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Study:
    """One experiment of the paper, or one in the same form added to it."""

    name: str
    title: str
    question: str
    paper: str
    runs: Callable[[Scale], Sequence[Spec]]
    summary: Callable[[Sequence[Result]], Summary]
    published: tuple[Published, ...] = ()
