"""E3: are self-probes more effective as preservation gradients than as replay targets?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.lab.drawing import budget_axis, by_budget, lines, panels, picture
from cplus.lab.records import RunResult
from cplus.lab.scales import Scale
from cplus.lab.study import Collected, ComparisonLine, Picture, Published, Summary, judged
from cplus.lab.summaries import KEPT_AND_LEARNED, leads, margin, pick, shown, strongest, table
from cplus.training.settings import RunSpec

TITLE = "Gradient or replay"
QUESTION = "Are self-probes more effective as preservation gradients than as replay targets?"
PAPER = "Sec. 4.4; Fig. 5; App. C.3"
FIG_5 = Published("Fig. 5", {"CPLUS is highest": "4 of 4"})

METHODS = ("probe-replay", "anchor-probe-replay", "cplus")
BUDGETS = (4, 8, 16, 32)


def runs(scale: Scale) -> list[RunSpec]:
    """Three uses of the same bank with the same number of updates."""
    budgets = [budget for budget in BUDGETS if budget in scale.budgets]
    return scale.each({"num_anchors": budgets, "method": METHODS, "seed": range(scale.seeds_where_three)})


def summary(mine: Sequence[RunResult]) -> Summary:
    """Retention by budget and use, with paired differences per budget and over all."""
    ours = pick(mine, method="cplus")
    claims = leads("CPLUS keeps more than {}, mean over budgets", mine, METHODS[:-1])
    for budget in dict.fromkeys(result.spec.num_anchors for result in mine):
        here, words = pick(mine, num_anchors=budget), f"CPLUS keeps more than {{}}, A={budget}"
        claims += leads(words, here, METHODS[:-1], paper="Sec. 4.4; Fig. 5")
    gains = [shown(margin(ours, pick(mine, method=name)), sign=True) for name in METHODS[:-1]]
    answer = (
        f"The same probes keep {gains[0]} points more as gradients than as replay, and {gains[1]} more than as replay "
        f"together with the anchors; {judged(claims)}."
    )
    return Summary(rows=table(mine, ("method", "num_anchors"), KEPT_AND_LEARNED), answer=answer, claims=tuple(claims))


# E3, gradient or replay: three uses of the same self-probes by anchor budget (Fig. 5).


def fig_self_probe_role_anchor_scale(found: Collected) -> Picture:
    """The same probes as gradients and as replay, by budget.

    Paper: Fig. 5.
    """
    own = found.studies["e03"]
    figure, (axis,) = panels(1, width=5.2, height=3.0, ylabel="Retention (%)")
    lines(axis, {method: by_budget(own.results, method) for method in METHODS})
    budget_axis(axis, (spec.num_anchors for spec in own.specs))
    caption = (
        "Three uses of the same self-probes with the same number of updates: as gradients (CPLUS), as replay, and as "
        "replay together with the anchors."
    )
    return picture(figure, "fig:self-probe-role-anchor-scale", "Fig. 5", caption)


def comparison(found: Collected) -> list[ComparisonLine]:
    """The budgets at which gradients keep most, with the paper's."""
    own = found.studies["e03"]
    groups = [
        {method: pick(own.results, num_anchors=budget, method=method) for method in METHODS}
        for budget in dict.fromkeys(spec.num_anchors for spec in own.specs)
    ]
    best = [strongest(each) for each in groups if all(each.values())]
    measured = f"{best.count('cplus')} of {len(best)}" if best else "not run"
    return [ComparisonLine("budgets at which gradients keep most", measured, FIG_5.numbers["CPLUS is highest"])]
