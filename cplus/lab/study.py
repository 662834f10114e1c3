"""A study: a question, the runs that answer it, the answer computed from them, and the published numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from cplus.evaluation.statistics import Estimate
from cplus.lab.records import Spec
from cplus.lab.scales import Scale
from cplus.training.settings import RunSpec


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """One row of a study's table: its settings, and its figures over the seeds."""

    at: Mapping[str, Any]
    figures: Mapping[str, Estimate]


@dataclass(frozen=True)
class Claim:
    """A statement as a difference that should be above 0, paired over the seeds; the margin is None if it was not run.

    `paper` is the place where the paper makes the statement; None if it is our own.
    """

    says: str
    margin: Estimate | None
    paper: str | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The difference's 95 % interval by Student's t; None for fewer than two seeds."""
        return None if self.margin is None else self.margin.interval

    @property
    def verdict(self) -> str:
        """`holds` or `fails` if the interval excludes 0, else `unclear`; `not run` if a side is missing.

        >>> Claim("", Estimate(3.0, 0.5, 5)).verdict
        'holds'
        """
        if self.margin is None:
            return "not run"
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return "unclear"
        return "holds" if self.margin.mean > 0 else "fails"


VERDICTS = ("holds", "fails", "unclear", "not run")


def tally(claims: Iterable[Claim]) -> dict[str, dict[str, int]]:
    """The number of claims with each verdict, separately for the paper's and our own.

    >>> tally([Claim("", None, paper="Fig. 5")])["paper"]["not run"]
    1
    """
    counts = {whose: dict.fromkeys(VERDICTS, 0) for whose in ("paper", "ours")}
    for claim in claims:
        counts["ours" if claim.paper is None else "paper"][claim.verdict] += 1
    return counts


def judged(claims: Iterable[Claim]) -> str:
    """The verdicts in one phrase, the paper's claims first and then our own.

    >>> made = Claim("", Estimate(3.0, 0.5, 5), paper="Fig. 5"), Claim(says="", margin=None)
    >>> judged(made)
    "1 of 1 of the paper's comparisons holds; 0 of 1 of our own, 1 not run"
    """
    whose = {"paper": "of the paper's comparisons", "ours": "of our own"}
    parts: list[str] = []
    for name, counts in tally(claims).items():
        if total := sum(counts.values()):
            hold = "holds" if total == 1 else "hold"
            rest = [f"{counts[v]} {'fail' if v == 'fails' and counts[v] > 1 else v}" for v in VERDICTS[1:] if counts[v]]
            first = f"{counts['holds']} of {total} {whose[name]}"
            parts.append(", ".join([first if parts else f"{first} {hold}", *rest]))
    return "; ".join(parts) or "no comparison"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A study's table, its claims, and the answer in one sentence."""

    rows: tuple[SummaryRow, ...]
    answer: str
    claims: tuple[Claim, ...] = ()

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "answer": self.answer,
            "verdicts": tally(self.claims),
            "claims": [{**asdict(one), "interval": one.interval, "verdict": one.verdict} for one in self.claims],
            "rows": [asdict(row) for row in self.rows],
        }


@dataclass(frozen=True)
class Published:
    """The published numbers of one table or figure by name."""

    where: str
    numbers: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure with its label in the paper, or one of our own, and its caption."""

    label: str
    paper: str
    caption: str
    figure: Any


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A measured number as text, and the paper's where it has one."""

    measured: str
    published: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with its label in the paper; the first column names the row."""

    label: str
    paper: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]


@dataclass(frozen=True)
class ComparisonLine:
    """One line of a study's comparison with the paper: what is compared, measured, published."""

    what: str
    measured: str
    published: str


ADDED_HERE = "added here"


@dataclass(frozen=True, kw_only=True)
class Study:
    """One experiment: of the paper, or added here in the same form."""

    name: str
    title: str
    question: str
    paper: str
    runs: Callable[[Scale], Sequence[Spec]]
    summary: Callable[[Sequence[Any]], Summary]
    published: tuple[Published, ...]
    figures: tuple[Callable[[Collected], Picture], ...]
    tables: tuple[Callable[[Collected], Table], ...]
    comparison: Callable[[Collected], list[ComparisonLine]]
    repeated: Callable[..., Sequence[Spec]] | None = None
    """The runs with what the study chose on other seeds and other rows, where it has such."""


def study_of(module: ModuleType) -> Study:
    """The study of a file: its constants, `runs`, `summary`, `comparison`, and what it calls `fig_` and `tab_`."""
    own = vars(module)
    return Study(
        name=module.__name__.rpartition(".")[2],
        title=own["TITLE"],
        question=own["QUESTION"],
        paper=own.get("PAPER", f"{ADDED_HERE}; docs/studies.md"),
        runs=own["runs"],
        summary=own["summary"],
        published=tuple(each for each in own.values() if isinstance(each, Published)),
        figures=tuple(make for name, make in own.items() if name.startswith("fig_")),
        tables=tuple(make for name, make in own.items() if name.startswith("tab_")),
        comparison=own["comparison"],
        repeated=own.get("repeated"),
    )


@dataclass(frozen=True, kw_only=True)
class CollectedStudy:
    """A study with its runs at the scale, the results that exist, and their summary; results are of one kind."""

    study: Study
    specs: tuple[Any, ...]
    results: tuple[Any, ...]
    summary: Summary

    @property
    def verdict(self) -> str:
        """The verdicts on the claims in one phrase; `not run` if no claim was run."""
        claims = self.summary.claims
        return judged(claims) if any(claim.verdict != "not run" for claim in claims) else "not run"


@dataclass(frozen=True, kw_only=True)
class Collected:
    """All studies of one folder.

    `refused` are the errors of damaged records; `unknown_records` counts those of no run of the scale.
    """

    scale: Scale
    folder: Path
    studies: Mapping[str, CollectedStudy]
    refused: tuple[str, ...]
    unknown_records: int

    @property
    def verdict(self) -> str:
        """The verdicts on the claims of all studies in one phrase."""
        return judged(claim for own in self.studies.values() for claim in own.summary.claims)

    def command(self, name: str) -> str:
        """The command that computes a study's results."""
        line = f"cplus study run {name} --scale {self.scale.name}"
        return line if self.folder == Path("results") / self.scale.name else f"{line} --out {self.folder.parent}"


def run_title(spec: Spec) -> str:
    """A run in words, for lists and progress bars."""
    where = spec.task if isinstance(spec, RunSpec) else " > ".join(spec.tasks)
    return f"{spec.method} {spec.model} {where} A={spec.num_anchors} N={spec.num_probes} seed {spec.seed}"
