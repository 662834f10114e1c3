"""E12, rotating evidence: Retention of every use of a refresh budget; not in the paper."""

from __future__ import annotations

import statistics

from cplus.plotting import OTHER
from cplus.studies.collected import Collected
from cplus.studies.e12 import by_setting, cost
from cplus.studies.figures.drawing import Picture, colour_and_marker, mark_not_run, panels, seed_count
from cplus.studies.figures.tables import ADDED_HERE, ComparisonLine, joined
from cplus.studies.summaries import over_seeds, retained


def fig_rotating_evidence(found: Collected) -> Picture:
    """Retention of every use of a refresh budget, and its rows of evidence."""
    groups = by_setting(found.studies["e12"].runs)
    means = {name: (over_seeds(own, retained), over_seeds(own, cost)) for name, own in groups.items()}
    order = sorted(groups, key=lambda name: statistics.fmean(result.retention for result in groups[name]))
    figure, (axis,) = panels(1, width=7.0, height=max(2.6, 0.3 * len(order) + 0.8))
    axis.grid(visible=True, axis="x")
    base = f"all {found.scale.base.num_probes} every epoch"
    for y, name in enumerate(order):
        kept, rows = means[name]
        if kept is not None and rows is not None:
            colour = colour_and_marker("cplus")[0] if name == base else OTHER
            axis.errorbar([kept.mean], [y], xerr=[kept.error or 0.0], color=colour, marker="o", capsize=2)
            axis.annotate(
                f"{rows.mean:,.0f} rows", (1.0, y), xycoords=("axes fraction", "data"), va="center", fontsize=7
            )
    axis.set_yticks(range(len(order)), order)
    axis.set_xlabel("Retention (%)")
    if not order:
        mark_not_run(axis)
    caption = (
        "Uses of evidence by Retention, with the rows of evidence of a whole run at the right; the dark point is the "
        f"fixed bank. Means and standard errors, {seed_count(kept for kept, _ in means.values())}."
    )
    return Picture(label="fig:rotating-evidence", paper="Added here", caption=caption, figure=figure)


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention with the small bank, with parts of the large one, and with all of it."""
    groups = by_setting(found.studies["e12"].runs)
    few, large = found.scale.base.num_probes, found.scale.large_bank
    names = (f"all {few} every epoch", f"1/{large // few} of {large} every epoch", f"all {large} every epoch")
    return [
        ComparisonLine(
            what=f"Retention, {few} probes / {large} in {large // few} parts by turns / all {large} (%)",
            measured=joined([over_seeds(groups.get(name, ()), retained) for name in names]),
            published=ADDED_HERE,
        )
    ]


FIGURES = (fig_rotating_evidence,)
TABLES = ()
