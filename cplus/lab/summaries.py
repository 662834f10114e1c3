"""From results to numbers: selection, grouping, means with standard errors, differences paired over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cplus.evaluation.statistics import Estimate, LossPoint, common_level, estimate, rise
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


def retained(result: RunResult) -> float:
    """Retention."""
    return result.retention


def learned(result: RunResult) -> float:
    """Acquisition."""
    return result.acquisition


def updates(result: RunResult) -> float:
    """The number of updates."""
    return float(result.counts["updates"])


def flops(result: RunResult) -> float:
    """FLOPs of training and of recurring preservation passes.

    Paper: App. E.12, 2PL a forward pass and 6PL a forward and backward pass.
    """
    return float(result.cost["training_flops"] + result.cost["preservation_flops"])


KEPT_AND_LEARNED: Mapping[str, Metric] = {"retention": retained, "acquisition": learned}


@dataclass(frozen=True, kw_only=True)
class RetentionMeasure:
    """How much of its past behaviour a run retains.

    `metric` is higher for a better run and equals `lossless` if nothing is lost; `better_than` and `points_more` are
    the words for a lead; `columns` are the metrics of the study's table.
    """

    metric: Metric
    lossless: float
    better_than: str
    points_more: str
    columns: Mapping[str, Metric]


RETENTION = RetentionMeasure(
    metric=retained,
    lossless=100.0,
    better_than="keeps more than",
    points_more="points more",
    columns=KEPT_AND_LEARNED,
)


def retention_measure(results: Sequence[RunResult]) -> RetentionMeasure:
    """Retention; for free text, the negated rise of the past answers' loss at matched learning."""
    if not free_text(results):
        return RETENTION
    past_loss_rise = matched_rise(results)

    def negated(result: RunResult) -> float | None:
        found = past_loss_rise(result)
        return None if found is None else -found

    return RetentionMeasure(
        metric=negated,
        lossless=0.0,
        better_than="loses less than",
        points_more="hundredths of a nat less",
        columns={"rise of past loss, nats/100": past_loss_rise, **KEPT_AND_LEARNED, **LOSSES},
    )


def free_text(results: Iterable[RunResult]) -> bool:
    """Whether any of the runs has free-text answers."""
    return any(result.spec.interface == "freeform" for result in results)


LOSSES: Mapping[str, Metric] = {
    "past loss": lambda result: result.past_nll,
    "new loss": lambda result: result.new_nll,
}


def matched_rise(results: Iterable[RunResult]) -> Metric:
    """The rise of the past answers' loss, in hundredths of a nat, at matched learning.

    Learning is matched at the lowest loss of the new answers that all these runs of the same model, task and seed
    reach.
    """
    curves: dict[tuple[int, str, str], list[list[LossPoint]]] = {}
    for result in results:
        if losses := _loss_curve(result):
            curves.setdefault(_pairing_key(result), []).append(losses)
    levels = {key: common_level(own) for key, own in curves.items()}

    def metric(result: RunResult) -> float | None:
        losses = _loss_curve(result)
        return 100 * rise(losses, levels[_pairing_key(result)]) if losses else None

    return metric


def _loss_curve(result: RunResult) -> list[LossPoint]:
    return [(point["new_nll"], point["past_nll"]) for point in result.curve if "new_nll" in point]


def _pairing_key(result: RunResult) -> tuple[int, str, str]:
    return result.spec.seed, result.spec.model, result.spec.task


def table(results: Sequence[RunResult], by: Sequence[str], metrics: Mapping[str, Metric]) -> tuple[SummaryRow, ...]:
    """One row per combination of these fields of the spec, in order of appearance."""
    groups: dict[tuple[Any, ...], list[RunResult]] = {}
    for result in results:
        groups.setdefault(tuple(getattr(result.spec, name) for name in by), []).append(result)
    rows = []
    for values, own in groups.items():
        found = {name: over_seeds(own, metric) for name, metric in metrics.items()}
        at = dict(zip(by, values, strict=True))
        rows.append(SummaryRow(at=at, figures={name: value for name, value in found.items() if value is not None}))
    return tuple(rows)


def seed_of(result: Result) -> Seed:
    """The seed that a result depends on, if any."""
    return None if seedless(result.spec) else result.spec.seed


def by_seed(results: Iterable[RunResult], metric: Metric) -> dict[Seed, float]:
    """Each seed's mean of a metric over its runs; runs without it are left out."""
    values: dict[Seed, list[float]] = {}
    for result in results:
        if (value := metric(result)) is not None:
            values.setdefault(seed_of(result), []).append(value)
    return {seed: statistics.fmean(own) for seed, own in values.items()}


def over_seeds(results: Iterable[RunResult], metric: Metric) -> Estimate | None:
    """Mean and standard error over seeds; None if no run has the metric."""
    values = list(by_seed(results, metric).values())
    return estimate(values) if values else None


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
    ours, theirs = _by_model_and_task(left, metric), _by_model_and_task(right, metric)
    found: dict[Seed, list[float]] = {}
    for key in ours:
        for seed, (one, other) in paired(ours[key], theirs.get(key, {})).items():
            found.setdefault(seed, []).append(one - other)
    return found


def margin(left: Iterable[RunResult], right: Iterable[RunResult], metric: Metric = retained) -> Estimate | None:
    """Left minus right where both were run: paired by model, task and seed, averaged to one value per seed."""
    return mean_of({seed: statistics.fmean(own) for seed, own in differences(left, right, metric).items()})


def _by_model_and_task(results: Iterable[RunResult], metric: Metric) -> dict[tuple[str, str], dict[Seed, float]]:
    groups: dict[tuple[str, str], list[RunResult]] = {}
    for result in results:
        groups.setdefault((result.spec.model, result.spec.task), []).append(result)
    return {key: by_seed(own, metric) for key, own in groups.items()}


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
