"""E3: are self-probes more effective as preservation gradients than as replay targets?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.lab.drawing import budget_axis, by_budget, estimates_of, joined, legend, lines, panels, seed_count
from cplus.lab.records import Result
from cplus.lab.scales import Scale
from cplus.lab.study import Collected, ComparisonLine, Picture, Published, Study, Summary, judged, run_results
from cplus.lab.summaries import free_text, leads, margin, pick, retention_measure, shown, strongest, table
from cplus.training.settings import RunSpec

METHODS = ("probe-replay", "anchor-probe-replay", "cplus")
BUDGETS = (4, 8, 16, 32)


def runs(scale: Scale) -> list[RunSpec]:
    """Three uses of the same bank with the same number of updates."""
    budgets = [budget for budget in BUDGETS if budget in scale.budgets]
    return [
        scale.at(method=method, num_anchors=budget, seed=seed)
        for budget in budgets
        for method in METHODS
        for seed in range(scale.seeds_where_three)
    ]


def summary(results: Sequence[Result]) -> Summary:
    """Retention by budget and use, with paired differences per budget and over all; free text at matched learning."""
    mine = run_results(results)
    kept = retention_measure(mine)
    ours = pick(mine, method="cplus")
    paper = None if free_text(mine) else "Sec. 4.4; Fig. 5"
    claims = leads(f"CPLUS {kept.better_than} {{}}, mean over budgets", mine, METHODS[:-1], kept.metric)
    for budget in dict.fromkeys(result.spec.num_anchors for result in mine):
        here = pick(mine, num_anchors=budget)
        claims += leads(f"CPLUS {kept.better_than} {{}}, A={budget}", here, METHODS[:-1], kept.metric, paper=paper)
    gains = [shown(margin(ours, pick(mine, method=name), kept.metric), sign=True) for name in METHODS[:-1]]
    answer = (
        f"The same probes keep {gains[0]} points more as gradients than as replay, and {gains[1]} more than as replay "
        f"together with the anchors; {judged(claims)}."
    )
    if free_text(mine):
        answer = (
            f"At matched learning of free text the past answers' loss rises by {gains[0]} {kept.points_more} with the "
            f"probes as gradients than as replay, and by {gains[1]} less than as replay together with the anchors; "
            f"{judged(claims)}."
        )
    rows = table(mine, ("method", "num_anchors"), kept.columns)
    return Summary(rows=rows, answer=answer, claims=tuple(claims))


# E3, gradient or replay: three uses of the same self-probes by anchor budget (Fig. 5).


def fig_self_probe_role_anchor_scale(found: Collected) -> Picture:
    """The same probes as gradients and as replay, by budget.

    Paper: Fig. 5.
    """
    own = found.studies["e03"]
    figure, (axis,) = panels(1, width=5.2, height=3.0)
    series = {method: by_budget(own.runs, method) for method in METHODS}
    lines(axis, series)
    budget_axis(axis, (spec.num_anchors for spec in own.specs))
    axis.set_ylabel("Retention (%)")
    legend(figure)
    caption = (
        "Three uses of the same self-probes with the same number of updates: as gradients (CPLUS), as replay, and as "
        f"replay together with the anchors. Means and standard errors, {seed_count(estimates_of(series))}."
    )
    return Picture(label="fig:self-probe-role-anchor-scale", paper="Fig. 5", caption=caption, figure=figure)


def comparison(found: Collected) -> list[ComparisonLine]:
    """The budgets at which gradients keep most, with the paper's, and their lead over both kinds of replay."""
    own = found.studies["e03"]
    led = total = 0
    for budget in dict.fromkeys(spec.num_anchors for spec in own.specs):
        groups = {method: pick(own.runs, num_anchors=budget, method=method) for method in METHODS}
        if all(groups.values()):
            total += 1
            led += strongest(groups) == "cplus"
    ours = pick(own.runs, method="cplus")
    return [
        ComparisonLine(
            "budgets at which gradients keep most",
            f"{led} of {total}" if total else "not run",
            str(STUDY.published[0].numbers["budgets at which CPLUS is highest"]),
        ),
        ComparisonLine(
            "gradients minus replay of probes / of anchors and probes (points of Retention)",
            joined([margin(ours, pick(own.runs, method=method)) for method in METHODS[:-1]], sign=True),
            "in a figure only",
        ),
    ]


STUDY = Study(
    name="e03",
    title="Gradient or replay",
    question="Are self-probes more effective as preservation gradients than as replay targets?",
    paper="Sec. 4.4; Fig. 5; App. C.3",
    runs=runs,
    summary=summary,
    published=(Published("Fig. 5", {"budgets at which CPLUS is highest": "4 of 4"}),),
    figures=(fig_self_probe_role_anchor_scale,),
    comparison=comparison,
)
