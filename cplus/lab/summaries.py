"""From results to numbers: selection, grouping, means with standard errors, differences paired over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

from cplus.evaluation.statistics import Estimate, estimate
from cplus.lab.records import Result, RunResult
from cplus.lab.scales import seedless
from cplus.lab.study import Claim, SummaryRow

Metric: TypeAlias = Callable[[RunResult], float | None]
Seed: TypeAlias = int | None
"""None if the run does not depend on its seed: its metrics are the same for every seed."""


def pick(results: Iterable[RunResult], **wanted: Any) -> list[RunResult]:
    """The results whose spec has these values; a tuple matches any of its members."""

    def fits(result: RunResult, name: str, value: Any) -> bool:
        found = getattr(result.spec, name)
        return found in value if isinstance(value, tuple) and not isinstance(found, tuple) else found == value

    return [result for result in results if all(fits(result, name, value) for name, value in wanted.items())]


T = TypeVar("T")


def grouped(things: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """The things with equal keys together, in order of appearance."""
    groups: dict[Any, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


retained: Callable[[RunResult], float] = attrgetter("retention")
learned: Callable[[RunResult], float] = attrgetter("acquisition")


def updates(result: RunResult) -> float:
    """The number of updates."""
    return float(result.counts["updates"])


def flops(result: RunResult) -> float:
    """FLOPs of training and of recurring preservation passes.

    Paper: App. E.12, 2PL a forward pass and 6PL a forward and backward pass.
    """
    return float(result.cost["training_flops"] + result.cost["preservation_flops"])


def diagnosed(*path: str) -> Metric:
    """A number of a run's diagnostics; None where it was not measured."""

    def metric(result: RunResult) -> float | None:
        found: Any = result.diagnostics
        for step in path:
            found = None if found is None else found.get(step)
        return None if found is None else float(found)

    return metric


KEPT_AND_LEARNED: Mapping[str, Metric] = {"retention": retained, "acquisition": learned}


def table(results: Sequence[RunResult], by: Sequence[str], metrics: Mapping[str, Metric]) -> tuple[SummaryRow, ...]:
    """One row per combination of these fields of the spec, in order of appearance."""
    groups = grouped(results, lambda result: tuple(getattr(result.spec, name) for name in by))
    return tuple(row(dict(zip(by, values, strict=True)), own, metrics) for values, own in groups.items())


def row(at: Mapping[str, Any], results: Sequence[RunResult], metrics: Mapping[str, Metric]) -> SummaryRow:
    """One row of a table; figures that no run has are left out."""
    found = {name: over_seeds(results, metric) for name, metric in metrics.items()}
    return SummaryRow(at=at, figures={name: value for name, value in found.items() if value is not None})


def seed_of(result: Result) -> Seed:
    """The seed that a result depends on, if any."""
    return None if seedless(result.spec) else result.spec.seed


def by_seed(results: Iterable[RunResult], metric: Metric) -> dict[Seed, float]:
    """Each seed's mean of a metric over its runs; runs without it are left out."""
    values = ((seed_of(result), value) for result in results if (value := metric(result)) is not None)
    groups = grouped(values, lambda pair: pair[0])
    return {seed: statistics.fmean(value for _, value in own) for seed, own in groups.items()}


def over_seeds(results: Iterable[RunResult], metric: Metric) -> Estimate | None:
    """Mean and standard error over seeds; None if no run has the metric."""
    return mean_of(by_seed(results, metric))


def paired(left: Mapping[Seed, float], right: Mapping[Seed, float]) -> dict[Seed, tuple[float, float]]:
    """The values of the common seeds; a value that does not depend on the seed is paired with every seed.

    >>> paired({0: 3.0, 1: 5.0}, {None: 1.0})
    {0: (3.0, 1.0), 1: (5.0, 1.0)}
    """
    seeds: list[Seed] = [seed for seed in dict.fromkeys((*left, *right)) if seed is not None]
    pairs = ((seed, left.get(seed, left.get(None)), right.get(seed, right.get(None))) for seed in seeds or [None])
    return {seed: (one, other) for seed, one, other in pairs if one is not None and other is not None}


def differences(
    left: Iterable[RunResult], right: Iterable[RunResult], metric: Metric = retained
) -> dict[Seed, list[float]]:
    """Left minus right where both were run, paired by model, task and seed; a list of values per seed."""
    sides = (grouped(results, lambda result: (result.spec.model, result.spec.task)) for results in (left, right))
    ours, theirs = ({key: by_seed(own, metric) for key, own in groups.items()} for groups in sides)
    found: dict[Seed, list[float]] = {}
    for key in ours:
        for seed, (one, other) in paired(ours[key], theirs.get(key, {})).items():
            found.setdefault(seed, []).append(one - other)
    return found


def margin(left: Iterable[RunResult], right: Iterable[RunResult], metric: Metric = retained) -> Estimate | None:
    """Left minus right where both were run: paired by model, task and seed, averaged to one value per seed."""
    return mean_of({seed: statistics.fmean(own) for seed, own in differences(left, right, metric).items()})


def difference(left: Mapping[Seed, float], right: Mapping[Seed, float]) -> Estimate | None:
    """The mean difference over common seeds, with its standard error.

    >>> difference({0: 3.0, 1: 5.0}, {0: 1.0, 1: 1.0, 2: 9.0})
    Estimate(mean=3.0, error=1.0, count=2)
    """
    return mean_of({seed: one - other for seed, (one, other) in paired(left, right).items()})


def strongest(groups: Mapping[str, Sequence[RunResult]], metric: Metric = retained) -> str | None:
    """The name of the group with the highest mean; None if no group has the metric."""
    means = {name: found.mean for name, own in groups.items() if (found := over_seeds(own, metric)) is not None}
    return max(means, key=means.__getitem__) if means else None


def above(
    says: str,
    left: Sequence[RunResult],
    right: Sequence[RunResult],
    metric: Metric = retained,
    *,
    paper: str | None = None,
) -> Claim:
    """The claim that left is above right."""
    return Claim(says, margin(left, right, metric), paper=paper)


def leads(
    says: str,
    results: Sequence[RunResult],
    others: Iterable[str],
    metric: Metric = retained,
    *,
    paper: str | None = None,
) -> list[Claim]:
    """The claims that CPLUS is above each of these methods, whose name stands for {} in the words."""
    ours = pick(results, method="cplus")
    return [above(says.format(name), ours, pick(results, method=name), metric, paper=paper) for name in others]


def mean_of(values: Mapping[Any, float]) -> Estimate | None:
    """The mean over seeds with its standard error; None without a seed."""
    return estimate(list(values.values())) if values else None


def shown(found: Estimate | None, *, sign: bool = False, digits: int = 1) -> str:
    """An estimate as text.

    >>> shown(Estimate(7.926, 0.51, 5), sign=True), shown(Estimate(50.0, None, 1)), shown(None)
    ('+7.9 ± 0.5', '50.0 (one seed)', 'not run')
    """
    if found is None:
        return "not run"
    value = f"{found.mean:+.{digits}f}" if sign else f"{found.mean:.{digits}f}"
    return f"{value} (one seed)" if found.error is None else f"{value} ± {found.error:.{digits}f}"
