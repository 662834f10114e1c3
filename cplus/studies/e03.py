"""E3: are self-probes more effective as preservation gradients than as replay targets?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.experiment.settings import RunSpec
from cplus.studies.scales import Scale
from cplus.studies.study import Published, Result, Study, Summary, judged
from cplus.studies.summaries import above, free_text, margin, pick, retention_measure, run_results, shown, table

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
    claims = [
        above(f"CPLUS {kept.better_than} {name}, mean over budgets", ours, pick(mine, method=name), kept.metric)
        for name in METHODS[:-1]
    ]
    for budget in dict.fromkeys(result.spec.num_anchors for result in mine):
        here = pick(mine, num_anchors=budget)
        claims += [
            above(
                f"CPLUS {kept.better_than} {name}, A={budget}",
                pick(here, method="cplus"),
                pick(here, method=name),
                kept.metric,
                paper=paper,
            )
            for name in METHODS[:-1]
        ]
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


STUDY = Study(
    name="e03",
    title="Gradient or replay",
    question="Are self-probes more effective as preservation gradients than as replay targets?",
    paper="Sec. 4.4; Fig. 5; App. C.3",
    runs=runs,
    summary=summary,
    published=(Published(where="Fig. 5", numbers={"budgets at which CPLUS is highest": "4 of 4"}),),
)
