"""Tables and comparison lines: each measured number with the published one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cplus.evaluation.statistics import Estimate
from cplus.experiment.record import RunResult
from cplus.studies import STUDIES
from cplus.studies.figures.drawing import method_name
from cplus.studies.summaries import Metric, over_seeds, pick, retained, shown

ADDED_HERE = "added here"


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


@dataclass(frozen=True, kw_only=True)
class ComparisonLine:
    """One line of a study's comparison with the paper: what is compared, measured, published."""

    what: str
    measured: str
    published: str


def cell(found: Estimate | None, published: Any = None) -> Cell:
    """A measured number with its standard error; the published one may have a standard error too.

    >>> cell(Estimate(83.26, 0.71, 5), (82.32, 0.64))
    Cell(measured='83.3 ± 0.7', published='82.32 ± 0.64')
    """
    if isinstance(published, tuple):
        return Cell(measured=shown(found), published=" ± ".join(f"{value:.2f}" for value in published))
    return Cell(measured=shown(found), published=None if published is None else f"{published:.2f}")


def published_numbers(study: str, index: int = 0) -> Mapping[str, Any]:
    """The paper's numbers from a study's declaration."""
    return STUDIES[study].published[index].numbers


def rows_by_method(
    results: Sequence[RunResult],
    names: Mapping[str, tuple[str, ...]],
    metrics: Sequence[Metric],
    published: Mapping[str, Sequence[Any]],
) -> tuple[tuple[tuple[str | Cell, ...], ...], list[Estimate | None]]:
    """One row per method, its names first and then each metric with the published value; and all estimates."""
    rows: list[tuple[str | Cell, ...]] = []
    drawn: list[Estimate | None] = []
    for method, words in names.items():
        found = [over_seeds(pick(results, method=method), metric) for metric in metrics]
        rows.append((*words, *map(cell, found, published[method])))
        drawn += found
    return tuple(rows), drawn


def compare_methods(
    what: str,
    results: Sequence[RunResult],
    methods: Sequence[str],
    published: Mapping[str, object],
    metric: Metric = retained,
) -> ComparisonLine:
    """A metric of several methods in one line."""
    return ComparisonLine(
        what=what,
        measured=joined([over_seeds(pick(results, method=method), metric) for method in methods]),
        published=joined_numbers([published[method] for method in methods]),
    )


def joined(found: Sequence[Estimate | None], *, sign: bool = False) -> str:
    """Estimates in one line, separated by slashes."""
    if all(each is None for each in found):
        return "not run"
    return " / ".join(shown(each, sign=sign) for each in found)


def joined_numbers(values: Sequence[object]) -> str:
    """Published numbers in one line, separated by slashes.

    >>> joined_numbers([5, 61.2])
    '5 / 61.20'
    """
    return " / ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values)


def joined_names(methods: Sequence[str]) -> str:
    """Method names in one line, separated by slashes."""
    return " / ".join(method_name(method) for method in methods)
