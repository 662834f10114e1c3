"""E14: does the topic cue matter, and what is in the banks?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cplus.lab.drawing import (
    PALETTE,
    budget_axis,
    estimates_of,
    legend,
    line,
    mark_not_run,
    panels,
    points_by,
    seed_count,
)
from cplus.lab.records import Result, RunResult
from cplus.lab.scales import SCARCE, Scale
from cplus.lab.study import (
    Cell,
    Collected,
    ComparisonLine,
    Picture,
    Published,
    Study,
    Summary,
    SummaryRow,
    Table,
    run_results,
)
from cplus.lab.summaries import KEPT_AND_LEARNED, Metric, above, margin, pick, shown, table
from cplus.training.settings import RunSpec

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


def of_bank(*path: str, percent: bool = False) -> Metric:
    """One number of the bank's audit."""

    def metric(result: RunResult) -> float | None:
        value: Any = result.diagnostics.get("bank")
        for step in path if value is not None else ():
            value = value[step]
        return None if value is None else (100.0 if percent else 1.0) * float(value)

    return metric


AUDITED: Mapping[str, Metric] = {
    **KEPT_AND_LEARNED,
    "yield": of_bank("yield"),
    "confidence": of_bank("confidence", "mean"),
    "exact copies of evaluated rows": of_bank("against", "exact"),
    "near copies of evaluated rows": of_bank("against", "near"),
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
    gains = {budget: shown(margin(*_sides(mine, budget)), sign=True) for budget in budgets}
    claims = tuple(
        above(f"CPLUS keeps more with the topic cue than without it, A={budget}", *_sides(mine, budget))
        for budget in budgets
    )
    rows: tuple[SummaryRow, ...] = table(mine, ("topics", "num_anchors"), AUDITED)
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


# E14, topic cue and bank audit: Retention with and without the cue, and the banks side by side (App. C.1, C.2).


CUES = {"without the cue": False, "with the cue": True}
LINES = {
    "probes": "probes",
    "unique": "unique inputs",
    "mean": "confidence, mean",
    "median": "confidence, median",
    "p10": "confidence, tenth percentile",
    "exact": "exact copies of evaluated rows",
    "near": "token Jaccard of at least 0.9",
}


def fig_topic_cue(found: Collected) -> Picture:
    """Retention and the share of valid requests by anchor budget, with the topic cue and without it."""
    runs = found.studies["e14"].runs
    figure, (left, right) = panels(2, width=3.8, height=2.7)
    share_valid = of_bank("yield", percent=True)
    drawn = []
    for (name, cue), colour, marker in zip(CUES.items(), PALETTE, "so", strict=False):
        own = pick(runs, topics=cue)
        kept = points_by(own, "num_anchors")
        line(left, kept, name, colour, marker)
        line(right, points_by(own, "num_anchors", share_valid), name, colour, marker)
        drawn += estimates_of({name: kept})
    for axis, label in ((left, "Retention (%)"), (right, "requests that became a probe (%)")):
        budget_axis(axis, (result.spec.num_anchors for result in runs))
        axis.set_ylabel(label)
        if not runs:
            mark_not_run(axis)
    legend(figure)
    caption = (
        "Left: Retention of CPLUS with the 24-area topic cue in its requests and without it. Right: the share of "
        f"requests whose text was valid, new and labelled. Means and standard errors, {seed_count(drawn)}. The paper "
        "reports no consistent gain from the cue, on one seed."
    )
    return Picture(label="fig:topic-cue", paper="App. C.1", caption=caption, figure=figure)


def tab_bank_audit(found: Collected) -> Table:
    """The banks side by side, with the cue and without it, and together with the paper's three."""
    runs = found.studies["e14"].runs
    paper = STUDY.published[0].numbers
    groups = {name: banks(runs, cue=cue) for name, cue in CUES.items()}
    columns = [f"{name}, seed {result.spec.seed}" for name, own in groups.items() for result in own]
    rows: list[tuple[str | Cell, ...]] = []
    for key, words in LINES.items():
        alone = [pooled([result]) or {} for own in groups.values() for result in own]
        cells = [Cell(measured=_number(key, figures[key])) for figures in alone]
        both: list[Cell] = []
        for name, own in groups.items():
            together: Mapping[str, float] | None = pooled(own)
            text = "not run" if together is None else _number(key, together[key])
            both.append(Cell(measured=text, published=_number(key, paper[key]) if CUES[name] else None))
        rows.append((words, *cells, *both))
    return Table(
        label="tab:bank-audit",
        paper="App. C.2",
        caption=(
            "Banks of the first seeds, one column each, then together; published: three banks with the cue against "
            "1,096 evaluated prompts."
        ),
        columns=("figure", *columns, *(f"together, {name}" for name in CUES)),
        rows=tuple(rows),
    )


def _number(key: str, value: float) -> str:
    return f"{value:.3f}" if key in ("mean", "median", "p10") else f"{value:,.0f}"


def comparison(found: Collected) -> list[ComparisonLine]:
    """The cue's gain, and the audit of the banks together, with the paper's."""
    own = found.studies["e14"]
    gains = [f"A = {claim.says.rpartition('=')[2]}: {shown(claim.margin, sign=True)}" for claim in own.summary.claims]
    together, paper = pooled(banks(own.runs, cue=True)), STUDY.published[0].numbers
    return [
        ComparisonLine(
            "CPLUS with the topic cue minus without it (points of Retention)",
            "; ".join(gains) or "not run",
            "no consistent gain",
        ),
        ComparisonLine(
            "banks together: unique / probes; confidence mean, median, p10; exact, near copies",
            "not run" if together is None else _together(together),
            _together(paper),
        ),
    ]


def _together(numbers: Mapping[str, float]) -> str:
    parts: Sequence[str] = [f"{numbers['unique']:,.0f} / {numbers['probes']:,.0f}"]
    confidence = ", ".join(f"{numbers[name]:.3f}" for name in ("mean", "median", "p10"))
    return "; ".join((*parts, confidence, f"{numbers['exact']:.0f}, {numbers['near']:.0f}"))


STUDY = Study(
    name="e14",
    title="Topic cue and bank audit",
    question="Does the topic cue matter, and what is in the banks?",
    paper="App. C.1, C.2",
    runs=runs,
    summary=summary,
    published=(
        Published(
            "App. C.2, three banks of 512 probes against 1,096 evaluated prompts",
            {
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
        Published("App. C.1, one seed", {"the topic cue": "did not consistently improve Retention"}),
    ),
    figures=(fig_topic_cue,),
    tables=(tab_bank_audit,),
    comparison=comparison,
)
