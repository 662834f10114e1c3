"""The frontier: Retention against updates, every method at its own best rate; not in the paper."""

from __future__ import annotations

from typing import Any

from cplus.evaluation.statistics import Estimate, estimate
from cplus.experiment.record import RunResult
from cplus.studies.collected import Collected
from cplus.studies.figures.drawing import (
    SOFT,
    Picture,
    colour_and_marker,
    mark_not_run,
    method_name,
    panels,
    seed_count,
)
from cplus.studies.figures.tables import ADDED_HERE, ComparisonLine, Table, cell
from cplus.studies.frontier import LEARNED, OURS, RECIPE, TUNING_SEEDS, as_in_the_demo, reported, updates
from cplus.studies.summaries import pick, shown

NAMED = {"replay": (-32, -3), "freeze-layers": (7, -7), "lora": (6, -4), "osf": (7, -12), "wise-ft": (3, -12)}
"""Neighbours with a name of their own in the figure, and where it is written; the others are dots."""
LOWEST = 75.0
"""Methods that keep less are in the table alone."""
PLACES = {"cplus": (-32, 2), "cplus-curvature": (7, -2), "cplus-repair": (7, 3), "sft-repair": (-52, 3)}


def _others(runs: list[RunResult]) -> list[RunResult]:
    return [run for run in runs if run.spec.seed not in TUNING_SEEDS and not as_in_the_demo(run)]


def _plain_line(runs: list[RunResult]) -> list[tuple[float, Estimate]]:
    """Mean updates and Retention of SFT at each rung that learned everything on every seed."""
    plain = pick(_others(runs), method="sft")
    points = []
    for rate, warmup in sorted({(run.spec.lr, run.spec.warmup) for run in plain}):
        own = pick(plain, lr=rate, warmup=warmup)
        if all(run.acquisition >= LEARNED for run in own):
            points.append((sum(map(updates, own)) / len(own), estimate([run.retention for run in own])))
    return sorted(points, key=lambda point: point[0])


def fig_frontier(found: Collected) -> Picture:
    """SFT's line over its ladder of rates, and each other method's chosen point."""
    runs = found.studies["frontier"].runs
    figure, [axis] = panels(1, width=6.4, height=3.6)
    line, table = _plain_line(list(runs)), reported(_others(list(runs)))
    if not line:
        mark_not_run(axis)
    else:
        colour, marker = colour_and_marker("sft")
        axis.errorbar(
            [x for x, _ in line],
            [y.mean for _, y in line],
            yerr=[y.error or 0.0 for _, y in line],
            color=colour,
            marker=marker,
            linewidth=1.6,
            markersize=4.5,
            capsize=2,
            label="SFT, ten rates and schedules",
        )
        for method, own in table.items():
            best = estimate([run.retention for run in own]).mean
            if method != "sft" and all(run.acquisition >= LEARNED for run in own) and best >= LOWEST:
                _point(axis, method, own)
        axis.plot([], [], "o", color=SOFT, alpha=0.5, markersize=3.5, label="another method at its best rate")
        axis.legend(loc="lower right")
    axis.set(xscale="log", xlabel="updates until the new rows are learned", ylabel="Retention (%)")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if str(value)[0] in "235" else "")
    estimates = [estimate([run.retention for run in own]) for own in table.values()]
    caption = (
        "Retention against the number of updates until 99 % of the new rows are learned. Every method has the rate and "
        "schedule that a seed of its own chose; the line is plain fine-tuning over its ladder of rates. Means and "
        f"standard errors, {seed_count(estimates)}."
    )
    return Picture(label="fig:frontier", paper="Added here", caption=caption, figure=figure)


def _point(axis: Any, method: str, own: list[RunResult]) -> None:
    x, y = sum(map(updates, own)) / len(own), estimate([run.retention for run in own])
    if method not in {**NAMED, **PLACES}:
        axis.plot([x], [y.mean], "o", color=SOFT, alpha=0.5, markersize=3.5)
        return
    colour = "#0072B2" if method in OURS else colour_and_marker(method)[0]
    marker = "*" if method == RECIPE else "o" if method in OURS else colour_and_marker(method)[1]
    size = 11 if method == RECIPE else 5
    axis.errorbar([x], [y.mean], yerr=[y.error or 0.0], color=colour, marker=marker, markersize=size, capsize=2)
    place = {**NAMED, **PLACES}[method]
    axis.annotate(method_name(method), (x, y.mean), xytext=place, textcoords="offset points", color=colour, fontsize=8)


def tab_frontier(found: Collected) -> Table:
    """Every method at its own best rate, the furthest above SFT's line first."""
    rows = found.studies["frontier"].summary.rows
    ahead = "above SFT at equal updates"
    learned = sorted((row for row in rows if ahead in row.figures), key=lambda row: -row.figures[ahead].mean)
    missing = [row for row in rows if ahead not in row.figures]
    return Table(
        label="tab:frontier",
        paper="Added here",
        caption="Every method at its own best rate, chosen on another seed, until 99 % of the new rows are learned.",
        columns=(
            "method",
            "rate",
            "warm-up",
            "updates",
            "Retention (%)",
            "above SFT's line (points)",
            "at equal FLOPs",
        ),
        rows=tuple(
            (
                method_name(row.at["method"]),
                f"{row.at['lr']:.2g}",
                "yes" if row.at["warmup"] else "no",
                cell(row.figures["updates"]),
                cell(row.figures["retention"]),
                cell(row.figures.get(ahead)),
                cell(row.figures.get("above SFT at equal FLOPs")),
            )
            for row in (*learned, *missing)
        ),
    )


def comparison(found: Collected) -> list[ComparisonLine]:
    """The recipe against plain fine-tuning's line."""
    rows = {row.at["method"]: row.figures for row in found.studies["frontier"].summary.rows}
    own = rows.get(RECIPE, {})
    return [
        ComparisonLine(
            what=f"{RECIPE}: Retention (%), updates, points above SFT's line at equal updates",
            measured=" / ".join(shown(own.get(n)) for n in ("retention", "updates", "above SFT at equal updates")),
            published=ADDED_HERE,
        )
    ]


FIGURES = (fig_frontier,)
TABLES = (tab_frontier,)
