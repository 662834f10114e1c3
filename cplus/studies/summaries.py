"""From results to figures: choosing, grouping, means with standard errors, differences paired over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cplus.evaluation.matched import LossPoint, common_level, rise
from cplus.evaluation.statistics import Estimate, estimate
from cplus.experiment.record import RunResult, SequenceResult
from cplus.studies.scales import seedless
from cplus.studies.study import Claim, Result, Row

Figure: TypeAlias = Callable[[RunResult], float | None]
Seed: TypeAlias = int | None
"""None where the seed decides nothing: that run's figure is the same for every seed."""


def single(results: Iterable[Result]) -> list[RunResult]:
    """The results that are of single runs."""
    return [result for result in results if isinstance(result, RunResult)]


def sequences(results: Iterable[Result]) -> list[SequenceResult]:
    """The results that are of sequences."""
    return [result for result in results if isinstance(result, SequenceResult)]


def pick(results: Iterable[RunResult], **wanted: Any) -> list[RunResult]:
    """The results whose spec has these values; a tuple stands for any of its members."""

    def fits(result: RunResult, name: str, value: Any) -> bool:
        found = getattr(result.spec, name)
        return found in value if isinstance(value, tuple) and not isinstance(found, tuple) else found == value

    return [result for result in results if all(fits(result, name, value) for name, value in wanted.items())]


def retained(result: RunResult) -> float:
    """Retention."""
    return result.retention


def learned(result: RunResult) -> float:
    """Acquisition."""
    return result.acquisition


KEPT_AND_LEARNED: Mapping[str, Figure] = {"retention": retained, "acquisition": learned}


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """How well runs keep: a figure of which more is better, its value where nothing is lost, and words for it."""

    figure: Figure
    whole: float
    better: str
    more: str
    figures: Mapping[str, Figure]


RETENTION = Keeping(
    figure=retained, whole=100.0, better="keeps more than", more="points more", figures=KEPT_AND_LEARNED
)


def keeping(results: Sequence[RunResult]) -> Keeping:
    """Retention; of free text the rise of the past answers' loss at matched learning, of which less is better."""
    if not free_text(results):
        return RETENTION
    lost = matched_rise(results)

    def spared(result: RunResult) -> float | None:
        found = lost(result)
        return None if found is None else -found

    return Keeping(
        figure=spared,
        whole=0.0,
        better="loses less than",
        more="hundredths of a nat less",
        figures={"rise of past loss, nats/100": lost, **KEPT_AND_LEARNED, **LOSSES},
    )


def free_text(results: Iterable[RunResult]) -> bool:
    """Whether some of the runs were asked in free text."""
    return any(result.spec.interface == "freeform" for result in results)


LOSSES: Mapping[str, Figure] = {
    "past loss": lambda result: result.past_nll,
    "new loss": lambda result: result.new_nll,
}


def matched_rise(results: Iterable[RunResult]) -> Figure:
    """The rise of the past answers' loss, in hundredths of a nat, where the new answers are learned equally well.

    That is the lowest loss of the new answers which all these runs of the same model, task and seed reach.
    """
    curves: dict[tuple[int, str, str], list[list[LossPoint]]] = {}
    for result in results:
        if looks := _looks(result):
            curves.setdefault(_cell(result), []).append(looks)
    levels = {cell: common_level(own) for cell, own in curves.items()}

    def figure(result: RunResult) -> float | None:
        looks = _looks(result)
        return 100 * rise(looks, levels[_cell(result)]) if looks else None

    return figure


def _looks(result: RunResult) -> list[LossPoint]:
    return [(point["new_nll"], point["past_nll"]) for point in result.curve if "new_nll" in point]


def _cell(result: RunResult) -> tuple[int, str, str]:
    """What runs are paired by."""
    return result.spec.seed, result.spec.model, result.spec.task


def table(results: Sequence[RunResult], by: Sequence[str], figures: Mapping[str, Figure]) -> tuple[Row, ...]:
    """One row for each combination of these fields of the spec, in the order they were met."""
    groups: dict[tuple[Any, ...], list[RunResult]] = {}
    for result in results:
        groups.setdefault(tuple(getattr(result.spec, name) for name in by), []).append(result)
    rows = []
    for place, own in groups.items():
        found = {name: over_seeds(own, figure) for name, figure in figures.items()}
        at = dict(zip(by, place, strict=True))
        rows.append(Row(at=at, figures={name: value for name, value in found.items() if value is not None}))
    return tuple(rows)


def seed_of(result: Result) -> Seed:
    """The seed that a result depends on."""
    return None if seedless(result.spec) else result.spec.seed


def by_seed(results: Iterable[RunResult], figure: Figure) -> dict[Seed, float]:
    """Each seed's mean of a figure over its runs; runs that lack it are left out."""
    values: dict[Seed, list[float]] = {}
    for result in results:
        if (value := figure(result)) is not None:
            values.setdefault(seed_of(result), []).append(value)
    return {seed: statistics.fmean(own) for seed, own in values.items()}


def over_seeds(results: Iterable[RunResult], figure: Figure) -> Estimate | None:
    """Mean and standard error over seeds; None where no run has the figure."""
    values = list(by_seed(results, figure).values())
    return estimate(values) if values else None


def paired(left: Mapping[Seed, float], right: Mapping[Seed, float]) -> dict[Seed, tuple[float, float]]:
    """The values of the seeds that both have; a value that no seed changes is paired with every seed's.

    >>> paired({0: 3.0, 1: 5.0}, {None: 1.0})
    {0: (3.0, 1.0), 1: (5.0, 1.0)}
    """
    seeds: list[Seed] = [seed for seed in dict.fromkeys((*left, *right)) if seed is not None]
    pairs = ((seed, left.get(seed, left.get(None)), right.get(seed, right.get(None))) for seed in seeds or [None])
    return {seed: (one, other) for seed, one, other in pairs if one is not None and other is not None}


def differences(
    left: Iterable[RunResult], right: Iterable[RunResult], figure: Figure = retained
) -> dict[Seed, list[float]]:
    """Left minus right where both were run, paired by model, task and seed: each seed's values."""
    ours, theirs = _by_place(left, figure), _by_place(right, figure)
    found: dict[Seed, list[float]] = {}
    for place in ours:
        for seed, (one, other) in paired(ours[place], theirs.get(place, {})).items():
            found.setdefault(seed, []).append(one - other)
    return found


def margin(left: Iterable[RunResult], right: Iterable[RunResult], figure: Figure = retained) -> Estimate | None:
    """Left minus right where both were run: paired by model, task and seed, averaged to one value per seed."""
    found = differences(left, right, figure)
    return estimate([statistics.fmean(own) for own in found.values()]) if found else None


def _by_place(results: Iterable[RunResult], figure: Figure) -> dict[tuple[str, str], dict[Seed, float]]:
    places: dict[tuple[str, str], list[RunResult]] = {}
    for result in results:
        places.setdefault((result.spec.model, result.spec.task), []).append(result)
    return {place: by_seed(own, figure) for place, own in places.items()}


def difference(left: Mapping[Seed, float], right: Mapping[Seed, float]) -> Estimate | None:
    """The mean difference over common seeds, with its standard error.

    >>> difference({0: 3.0, 1: 5.0}, {0: 1.0, 1: 1.0, 2: 9.0})
    Estimate(mean=3.0, error=1.0, count=2)
    """
    both = [one - other for one, other in paired(left, right).values()]
    return estimate(both) if both else None


def strongest(groups: Mapping[str, Sequence[RunResult]], figure: Figure = retained) -> str | None:
    """The name of the group with the highest mean figure; None where none has it."""
    means = {name: found.mean for name, own in groups.items() if (found := over_seeds(own, figure)) is not None}
    return max(means, key=means.__getitem__) if means else None


def above(
    says: str,
    left: Sequence[RunResult],
    right: Sequence[RunResult],
    figure: Figure = retained,
    *,
    paper: str | None = None,
) -> Claim:
    """The claim that left is above right."""
    return Claim(says=says, margin=margin(left, right, figure), paper=paper)


def shown(found: Estimate | None, *, sign: bool = False) -> str:
    """A figure as a person reads it.

    >>> shown(Estimate(7.926, 0.51, 5), sign=True), shown(Estimate(50.0, None, 1)), shown(None)
    ('+7.9 ± 0.5', '50.0 (one seed)', 'not run')
    """
    if found is None:
        return "not run"
    value = f"{found.mean:+.1f}" if sign else f"{found.mean:.1f}"
    return f"{value} (one seed)" if found.error is None else f"{value} ± {found.error:.1f}"
