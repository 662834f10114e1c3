"""E6, dynamics and cost: Retention against FLOPs (Fig. 7) and over the epochs (Figs. 8, 12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cplus.evaluation.statistics import Estimate, estimate
from cplus.experiment.record import RunResult
from cplus.studies.collected import Collected
from cplus.studies.e06 import CURVES, first_full
from cplus.studies.figures.drawing import (
    Picture,
    Points,
    colour_and_marker,
    estimates_of,
    legend,
    lines,
    mark_not_run,
    method_name,
    model_size,
    panels,
    seed_count,
)
from cplus.studies.figures.tables import ComparisonLine, compare_methods, published_numbers
from cplus.studies.summaries import pick


def fig_retention_compute(found: Collected) -> Picture:
    """Retention gained over SFT against FLOPs relative to SFT, one panel per model.

    Paper: Fig. 7.
    """
    rows = [row for row in found.studies["e06"].summary.rows if "gain over SFT" in row.figures]
    models = sorted({row.at["model"] for row in rows}, key=model_size) or [found.scale.base.model]
    figure, axes = panels(len(models), width=3.3, height=2.8)
    drawn: list[Estimate] = []
    for axis, model in zip(axes, models, strict=True):
        here = [row for row in rows if row.at["model"] == model]
        for row in here:
            gain, cost = row.figures["gain over SFT"], row.figures["cost"]
            colour, marker = colour_and_marker(row.at["method"])
            axis.errorbar(
                [cost.mean],
                [gain.mean],
                [gain.error or 0.0],
                color=colour,
                marker=marker,
                capsize=2,
                linestyle="none",
                label=method_name(row.at["method"]),
            )
            drawn.append(gain)
        _cost_axis(axis, [row.figures["cost"].mean for row in here])
        axis.set(title=model, xlabel="training FLOPs (times SFT's, log scale)")
        if not here:
            mark_not_run(axis)
    axes[0].set_ylabel("Retention gained over SFT (points)")
    legend(figure)
    caption = (
        f"Retention gained over SFT against training FLOPs relative to SFT, A = {found.scale.anchors}, "
        f"N = {found.scale.small_bank} probes; one-time preparation is left out. Vertical scales differ. Means and "
        f"standard errors, {seed_count(drawn)}."
    )
    return Picture(label="fig:retention-compute", paper="Fig. 7", caption=caption, figure=figure)


def _cost_axis(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic axis of factors with plain numbers."""
    axis.set_xscale("log", base=2)
    marks = [1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64]
    ticks = [mark for mark in marks if mark <= 1.3 * max(values, default=1.0)]
    axis.set_xticks(ticks, [f"{mark:g}×" for mark in ticks])
    axis.set_xticks([], minor=True)


def fig_learning_dynamics(found: Collected) -> Picture:
    """Retention over epochs, and the path of Acquisition and Retention.

    Paper: Fig. 8.
    """
    own = found.studies["e06"].runs
    figure, (left, right) = panels(2, width=4.0, height=2.9)
    drawn = _over_epochs(left, own, "retention")
    draw_path(right, own)
    legend(figure)
    caption = (
        f"Left: Retention after every epoch. Right: the path of Acquisition and Retention. A = {found.scale.anchors}. "
        f"Large markers are the first epoch with full Acquisition. Error bars (left) are standard errors, "
        f"{seed_count(drawn)}."
    )
    return Picture(label="fig:learning-dynamics", paper="Fig. 8", caption=caption, figure=figure)


def fig_epoch_level_dynamics(found: Collected) -> Picture:
    """Retention and Acquisition after every epoch, and the path of both.

    Paper: Fig. 12.
    """
    own = found.studies["e06"].runs
    figure, (left, middle, right) = panels(3, width=3.2, height=2.7)
    drawn = _over_epochs(left, own, "retention")
    _over_epochs(middle, own, "acquisition")
    draw_path(right, own)
    right.set_ylim(left.get_ylim())
    legend(figure)
    caption = (
        f"Retention and Acquisition after every epoch, and the path of both, on the scale of the left panel. "
        f"A = {found.scale.anchors}, learning rate {found.scale.base.lr:g}. Error bars are standard errors, "
        f"{seed_count(drawn)}."
    )
    return Picture(label="fig:epoch-level-dynamics", paper="Fig. 12", caption=caption, figure=figure)


def _over_epochs(axis: Any, results: Sequence[RunResult], name: str) -> list[Estimate]:
    series = {method: _curve(results, method, name) for method in CURVES}
    lines(axis, series)
    for method, points in series.items():
        _mark_first_full(axis, points, points, _curve(results, method, "acquisition"), colour_and_marker(method)[0])
    axis.locator_params(axis="x", integer=True)
    axis.set(xlabel="epochs", ylabel=f"{name.capitalize()} (%)")
    return estimates_of(series)


def draw_path(axis: Any, results: Sequence[RunResult]) -> None:
    """Retention against Acquisition, epoch by epoch."""
    for method in CURVES:
        colour, marker = colour_and_marker(method)
        kept, learned = _curve(results, method, "retention"), _curve(results, method, "acquisition")
        axis.plot(
            [found.mean for _, found in learned],
            [found.mean for _, found in kept],
            color=colour,
            marker=marker,
            markersize=3.5,
            linewidth=1.3,
        )
        _mark_first_full(axis, [(found.mean, found) for _, found in learned], kept, learned, colour)
    axis.set(xlabel="Acquisition (%)", ylabel="Retention (%)")
    if not any(result.curve for result in results):
        mark_not_run(axis)


def _curve(results: Sequence[RunResult], method: str, name: str) -> Points:
    """Retention or Acquisition after every epoch; by definition the base model has 100 and 0 percent."""
    own = [result for result in pick(results, method=method) if result.curve]
    if not own:
        return []
    start = estimate([100.0 if name == "retention" else 0.0] * len(own))
    epochs = [point["epoch"] for point in own[0].curve]
    after = [(e, estimate([result.curve[i][name] for result in own])) for i, e in enumerate(epochs)]
    return [(0.0, start), *after]


def _mark_first_full(axis: Any, across: Points, up: Points, learned: Points, colour: str) -> None:
    """A large filled marker at the first epoch whose mean Acquisition is full."""
    for (x, _), (_, y), (_, now) in zip(across, up, learned, strict=True):
        if now.mean >= 100.0:
            axis.plot([x], [y.mean], marker="o", markersize=9, color=colour, zorder=4)
            return


def comparison(found: Collected) -> list[ComparisonLine]:
    """The first epoch at full Acquisition, with the paper's, and the cost of CPLUS."""
    own = found.studies["e06"]
    curves = [result for result in own.runs if result.curve]
    ours = [row.figures for row in own.summary.rows if row.at.get("method") == "cplus"]
    costs = [figures["cost"] for figures in ours if "cost" in figures]
    return [
        compare_methods(
            "first epoch at full Acquisition, CPLUS / Replay / CPL",
            curves,
            ("cplus", "replay", "cpl"),
            published_numbers("e06"),
            first_full,
        ),
        ComparisonLine(
            what="FLOPs of CPLUS with the small bank, times SFT's, by model",
            measured=" / ".join(f"{cost.mean:.2f}" for cost in costs) or "not run",
            published="in a figure only",
        ),
    ]


FIGURES = (fig_learning_dynamics, fig_retention_compute, fig_epoch_level_dynamics)
TABLES = ()
