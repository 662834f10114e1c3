"""E14: does the topic cue matter, and what is in the banks?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cplus.experiment.record import RunResult
from cplus.experiment.settings import RunSpec
from cplus.studies.scales import SCARCE, Scale
from cplus.studies.study import Published, Result, Study, Summary, SummaryRow
from cplus.studies.summaries import (
    KEPT_AND_LEARNED,
    Metric,
    above,
    margin,
    pick,
    run_results,
    shown,
    table,
)

NUM_BANKS = 3
"""The paper audits three banks."""


def runs(scale: Scale) -> list[RunSpec]:
    """CPLUS with and without the topic cue at the scarce budgets, each run with an audit of its bank.

    At the budget of the other comparisons there are as many seeds as the paper audits banks.
    """
    seeds = {budget: scale.seeds_where_one for budget in SCARCE if budget in scale.budgets}
    seeds[scale.anchors] = max(scale.seeds_where_one, scale.seeds_where_three)
    return [
        scale.at(topics=cue, num_anchors=budget, external=(), diagnose=("bank",), seed=seed)
        for cue in (False, True)
        for budget, count in seeds.items()
        for seed in range(count)
    ]


def of_bank(*path: str) -> Metric:
    """One number of the bank's audit."""

    def metric(result: RunResult) -> float | None:
        value: Any = result.diagnostics.get("bank")
        for step in path if value is not None else ():
            value = value[step]
        return None if value is None else float(value)

    return metric


FIGURES: Mapping[str, Metric] = {
    **KEPT_AND_LEARNED,
    "yield": of_bank("yield"),
    "confidence": of_bank("confidence", "mean"),
    "exact copies of evaluated rows": of_bank("against", "exact"),
    "near copies of evaluated rows": of_bank("against", "near"),
    "areas covered": of_bank("areas"),
}


def banks(results: Sequence[RunResult], *, cue: bool) -> list[RunResult]:
    """The runs whose banks are compared side by side: one budget, the first seeds."""
    own = [result for result in results if result.spec.topics == cue and "bank" in result.diagnostics]
    counts = [result.spec.num_anchors for result in own]
    most = max(set(counts), key=lambda budget: (counts.count(budget), budget), default=0)
    return sorted(pick(own, num_anchors=most), key=lambda result: result.spec.seed)[:NUM_BANKS]


def pooled(results: Sequence[RunResult]) -> dict[str, float] | None:
    """The figures of several banks together, as the paper gives them; None without a bank.

    Paper: App. C.2.
    """
    from cplus.probes.audit import together  # scipy and numpy take a second to import

    found = [result.diagnostics["bank"] for result in results]
    return together(found) if found else None


def summary(results: Sequence[Result]) -> Summary:
    """Retention with and without the cue by budget, and the audit of the banks."""
    mine = run_results(results)
    budgets = sorted({result.spec.num_anchors for result in mine})
    gains = {budget: _gain(mine, budget) for budget in budgets}
    claims = tuple(
        above(f"CPLUS keeps more with the topic cue than without it, A={budget}", *_sides(mine, budget))
        for budget in budgets
    )
    rows: tuple[SummaryRow, ...] = table(mine, ("topics", "num_anchors"), FIGURES)
    together = pooled(banks(mine, cue=True))
    audited = "not run"
    if together is not None:
        audited = (
            f"{together['unique']:,.0f} of {together['probes']:,.0f} probes are unique, mean confidence "
            f"{together['mean']:.3f}, {together['exact']:.0f} exact and {together['near']:.0f} near copies of "
            "evaluated rows"
        )
    listed = ", ".join(f"{gain} at A={budget}" for budget, gain in gains.items()) or "not run"
    answer = f"The topic cue changes Retention by {listed} points; in the banks with the cue {audited}."
    return Summary(rows=rows, answer=answer, claims=claims)


def _sides(results: Sequence[RunResult], budget: int) -> tuple[list[RunResult], list[RunResult]]:
    here = pick(results, num_anchors=budget)
    return pick(here, topics=True), pick(here, topics=False)


def _gain(results: Sequence[RunResult], budget: int) -> str:
    return shown(margin(*_sides(results, budget)), sign=True)


STUDY = Study(
    name="e14",
    title="Topic cue and bank audit",
    question="Does the topic cue matter, and what is in the banks?",
    paper="App. C.1, C.2",
    runs=runs,
    summary=summary,
    published=(
        Published(
            where="App. C.2, three banks of 512 probes against 1,096 evaluated prompts",
            numbers={
                "probes": 1536,
                "unique": 1536,
                "mean": 0.915,
                "median": 0.984,
                "p10": 0.696,
                "exact": 1,
                "near": 2,
                "exact_share": 0.07,
                "near_share": 0.13,
            },
        ),
        Published(where="App. C.1, one seed", numbers={"the topic cue": "did not consistently improve Retention"}),
    ),
)
