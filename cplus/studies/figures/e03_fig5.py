"""E3, gradient or replay: three uses of the same self-probes by anchor budget (Fig. 5)."""

from __future__ import annotations

from cplus.studies.collected import Collected
from cplus.studies.e03 import METHODS
from cplus.studies.figures.drawing import (
    Picture,
    budget_axis,
    by_budget,
    estimates_of,
    legend,
    lines,
    panels,
    seed_count,
)
from cplus.studies.figures.tables import ComparisonLine, joined, published_numbers
from cplus.studies.summaries import margin, pick, strongest


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
            what="budgets at which gradients keep most",
            measured=f"{led} of {total}" if total else "not run",
            published=str(published_numbers("e03")["budgets at which CPLUS is highest"]),
        ),
        ComparisonLine(
            what="gradients minus replay of probes / of anchors and probes (points of Retention)",
            measured=joined([margin(ours, pick(own.runs, method=method)) for method in METHODS[:-1]], sign=True),
            published="in a figure only",
        ),
    ]


FIGURES = (fig_self_probe_role_anchor_scale,)
TABLES = ()
