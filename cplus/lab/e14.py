"""E14: does the topic cue matter, and what is in the banks?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cplus.lab.drawing import PALETTE, budget_axis, line, panels, picture, points_by, seed_count
from cplus.lab.records import RunResult
from cplus.lab.scales import SCARCE, Scale
from cplus.lab.study import Cell, Collected, ComparisonLine, Picture, Published, Summary, Table
from cplus.lab.summaries import KEPT_AND_LEARNED, Metric, above, pick, shown, table
from cplus.training.settings import RunSpec

TITLE = "Topic cue and bank audit"
QUESTION = "Does the topic cue matter, and what is in the banks?"
PAPER = "App. C.1, C.2"
PUBLISHED_0 = Published(
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
)
PUBLISHED_1 = Published("App. C.1, one seed", {"the topic cue": "did not consistently improve Retention"})

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


def summary(mine: Sequence[RunResult]) -> Summary:
    """Retention with and without the cue by budget, and the audit of the banks."""
    budgets = sorted({result.spec.num_anchors for result in mine})
    claims = tuple(
        above(f"CPLUS keeps more with the topic cue than without it, A={budget}", *_sides(mine, budget))
        for budget in budgets
    )
    together = pooled(banks(mine, cue=True))
    audited = "not run"
    if together is not None:
        audited = (
            f"{together['unique']:,.0f} of {together['probes']:,.0f} probes are unique, mean confidence "
            f"{together['mean']:.3f}, {together['exact']:.0f} exact and {together['near']:.0f} near copies of "
            "evaluated rows"
        )
    gains = [shown(claim.margin, sign=True) for claim in claims]
    listed = ", ".join(f"{gain} at A={budget}" for budget, gain in zip(budgets, gains, strict=True)) or "not run"
    answer = f"The topic cue changes Retention by {listed} points; in the banks with the cue {audited}."
    return Summary(rows=table(mine, ("topics", "num_anchors"), AUDITED), answer=answer, claims=claims)


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
    runs = found.studies["e14"].results
    figure, (left, right) = panels(2, width=3.8, height=2.7, ylabel="Retention (%)")
    for (name, cue), colour, marker in zip(CUES.items(), PALETTE, "so", strict=False):
        line(left, points_by(pick(runs, topics=cue), "num_anchors"), name, colour, marker)
    seeds = seed_count(figure.estimates)
    for (name, cue), colour, marker in zip(CUES.items(), PALETTE, "so", strict=False):
        valid = points_by(pick(runs, topics=cue), "num_anchors", lambda run: 100.0 * run.diagnostics["bank"]["yield"])
        line(right, valid, name, colour, marker)
    for axis in (left, right):
        budget_axis(axis, (result.spec.num_anchors for result in runs))
    right.set_ylabel("requests that became a probe (%)")
    caption = (
        "Left: Retention of CPLUS with the 24-area topic cue in its requests and without it. Right: the share of "
        f"requests whose text was valid, new and labelled. Means and standard errors, {seeds}. The paper "
        "reports no consistent gain from the cue, on one seed."
    )
    return picture(figure, "fig:topic-cue", "App. C.1", caption, "")


def tab_bank_audit(found: Collected) -> Table:
    """The banks side by side, with the cue and without it, and together with the paper's three."""
    paper = PUBLISHED_0.numbers
    groups = {name: banks(found.studies["e14"].results, cue=cue) for name, cue in CUES.items()}
    alone = {f"{name}, seed {run.spec.seed}": pooled([run]) for name, own in groups.items() for run in own}
    together = {f"together, {name}": pooled(own) for name, own in groups.items()}

    def text(key: str, figures: Mapping[str, float] | None) -> str:
        if figures is None:
            return "not run"
        return f"{figures[key]:.3f}" if key in ("mean", "median", "p10") else f"{figures[key]:,.0f}"

    rows: list[tuple[str | Cell, ...]] = []
    for key, words in LINES.items():
        cells = [Cell(measured=text(key, figures)) for figures in (*alone.values(), *together.values())]
        rows.append((words, *cells[:-1], Cell(measured=cells[-1].measured, published=text(key, paper))))
    return Table(
        label="tab:bank-audit",
        paper="App. C.2",
        caption=(
            "Banks of the first seeds, one column each, then together; published: three banks with the cue against "
            "1,096 evaluated prompts."
        ),
        columns=("figure", *alone, *together),
        rows=tuple(rows),
    )


def comparison(found: Collected) -> list[ComparisonLine]:
    """The cue's gain, and the audit of the banks together, with the paper's."""
    own = found.studies["e14"]
    gains = [f"A = {claim.says.rpartition('=')[2]}: {shown(claim.margin, sign=True)}" for claim in own.summary.claims]
    together, paper = pooled(banks(own.results, cue=True)), PUBLISHED_0.numbers
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
