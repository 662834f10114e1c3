"""The figures of E5, E6 and E13: tasks one after another, epoch by epoch, what it costs, and a gentle start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cplus.evaluation.statistics import Estimate, estimate
from cplus.experiment.record import RunResult, SequenceResult
from cplus.studies import e05, e06, e13
from cplus.studies.collected import Collected
from cplus.studies.figures.drawing import Picture, Points, counted, empty, legend, lines, look, method_name, sheet, size
from cplus.studies.summaries import pick


def fig_sequential_multitask(found: Collected) -> Picture:
    """The accuracy on every task met so far, stage by stage, and their average.

    Paper: Fig. 6.
    """
    own, tasks = found.studies["e05"].sequences, found.scale.tasks
    columns = len(tasks) + 1 if len(tasks) < 4 else 3
    figure, axes = sheet(columns, -(-(len(tasks) + 1) // columns), width=3.0, height=2.3, share=True)
    drawn: list[Estimate] = []
    for place, (axis, task) in enumerate(zip(axes, (*tasks, "average"), strict=False)):
        first = min(place, len(tasks) - 1) if task != "average" else 0
        series = {m: _stages(own, m, place, first, len(tasks)) for m in e05.METHODS}
        lines(axis, series)
        axis.set(title="all tasks so far" if task == "average" else task, xlim=(0.6, len(tasks) + 0.4))
        axis.set_xticks(range(1, len(tasks) + 1), [f"{n}" for n in range(1, len(tasks) + 1)])
        axis.set_xlabel("tasks learned")
        drawn += [found for points in series.values() for _, found in points]
    for axis in axes[len(tasks) + 1 :]:
        axis.set_axis_off()
    for axis in axes[::columns]:
        axis.set_ylabel("accuracy (%)")
    legend(figure)
    caption = (
        f"Accuracy on each task from the stage that learns it, in the order {' → '.join(tasks)}; the last panel is the "
        f"unweighted mean over the tasks met. The first stage is shared. Means and standard errors, {counted(drawn)}."
    )
    return Picture(label="fig:sequential-multitask", paper="Fig. 6", caption=caption, figure=figure)


def _stages(results: Sequence[SequenceResult], method: str, place: int, first: int, count: int) -> Points:
    """The accuracy on one task after each stage from `first` on; the place after the last task is the average."""
    own = [result for result in results if result.spec.method == method]
    if not own:
        return []
    if place == count:
        return [(n, estimate([e05.average(result, n) for result in own])) for n in range(1, count + 1)]
    return [(n, estimate([result.accuracy[n][place] for result in own])) for n in range(first + 1, count + 1)]


def fig_retention_compute(found: Collected) -> Picture:
    """Retention gained over SFT against FLOPs relative to SFT, one panel a model.

    Paper: Fig. 7.
    """
    own = found.studies["e06"]
    rows = [row for row in own.summary.rows if "gain over SFT" in row.figures]
    models = sorted({row.at["model"] for row in rows}, key=size) or [found.scale.base.model]
    figure, axes = sheet(len(models), width=3.3, height=2.8)
    drawn: list[Estimate] = []
    for axis, model in zip(axes, models, strict=True):
        here = [row for row in rows if row.at["model"] == model]
        for row in here:
            gain, cost = row.figures["gain over SFT"], row.figures["cost"]
            colour, marker = look(row.at["method"])
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
        _costs(axis, [row.figures["cost"].mean for row in here])
        axis.set(title=model, xlabel="training FLOPs (times SFT's, log scale)")
        if not here:
            empty(axis)
    axes[0].set_ylabel("Retention gained over SFT (points)")
    legend(figure)
    caption = (
        f"Retention gained over SFT against training FLOPs relative to SFT, A = {found.scale.anchors}, "
        f"N = {found.scale.half} probes; one-time preparation is left out. Vertical scales differ. Means and standard "
        f"errors, {counted(drawn)}."
    )
    return Picture(label="fig:retention-compute", paper="Fig. 7", caption=caption, figure=figure)


def _costs(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic axis of factors with plain numbers."""
    axis.set_xscale("log", base=2)
    marks = [1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64]
    shown = [mark for mark in marks if mark <= 1.3 * max(values, default=1.0)]
    axis.set_xticks(shown, [f"{mark:g}×" for mark in shown])
    axis.set_xticks([], minor=True)


def curve(results: Sequence[RunResult], method: str, figure: str) -> Points:
    """A figure after every epoch over the seeds; before the first all is kept and nothing learned, by definition."""
    own = [result for result in pick(results, method=method) if result.curve]
    if not own:
        return []
    start = estimate([100.0 if figure == "retention" else 0.0] * len(own))
    epochs = [point["epoch"] for point in own[0].curve]
    after = [(e, estimate([result.curve[i][figure] for result in own])) for i, e in enumerate(epochs)]
    return [(0.0, start), *after]


def _first_full(axis: Any, across: Points, up: Points, learned: Points, colour: str) -> None:
    """A large filled marker at the first epoch whose mean Acquisition is full."""
    for (x, _), (_, y), (_, now) in zip(across, up, learned, strict=True):
        if now.mean >= 100.0:
            axis.plot([x], [y.mean], marker="o", markersize=9, color=colour, zorder=4)
            return


def _over_epochs(axis: Any, results: Sequence[RunResult], figure: str) -> list[Estimate]:
    series = {method: curve(results, method, figure) for method in e06.CURVES}
    lines(axis, series)
    for method, points in series.items():
        _first_full(axis, points, points, curve(results, method, "acquisition"), look(method)[0])
    axis.locator_params(axis="x", integer=True)
    axis.set(xlabel="epochs", ylabel=f"{figure.capitalize()} (%)")
    return [found for points in series.values() for _, found in points]


def _path(axis: Any, results: Sequence[RunResult]) -> None:
    """Retention against Acquisition, epoch by epoch."""
    for method in e06.CURVES:
        colour, marker = look(method)
        kept, learned = curve(results, method, "retention"), curve(results, method, "acquisition")
        axis.plot(
            [found.mean for _, found in learned],
            [found.mean for _, found in kept],
            color=colour,
            marker=marker,
            markersize=3.5,
            linewidth=1.3,
        )
        _first_full(axis, [(found.mean, found) for _, found in learned], kept, learned, colour)
    axis.set(xlabel="Acquisition (%)", ylabel="Retention (%)")
    if not any(result.curve for result in results):
        empty(axis)


def fig_learning_dynamics(found: Collected) -> Picture:
    """Retention over epochs, and the path of Acquisition and Retention.

    Paper: Fig. 8.
    """
    own = found.studies["e06"].runs
    figure, (left, right) = sheet(2, width=4.0, height=2.9)
    drawn = _over_epochs(left, own, "retention")
    _path(right, own)
    legend(figure)
    caption = (
        f"Left: Retention after every epoch. Right: the path of Acquisition and Retention. A = {found.scale.anchors}. "
        f"Large markers are the first epoch with full Acquisition. Error bars (left) are standard errors, "
        f"{counted(drawn)}."
    )
    return Picture(label="fig:learning-dynamics", paper="Fig. 8", caption=caption, figure=figure)


def fig_epoch_level_dynamics(found: Collected) -> Picture:
    """Retention and Acquisition after every epoch, and the path of both.

    Paper: Fig. 12.
    """
    own = found.studies["e06"].runs
    figure, (left, middle, right) = sheet(3, width=3.2, height=2.7)
    drawn = _over_epochs(left, own, "retention")
    _over_epochs(middle, own, "acquisition")
    _path(right, own)
    right.set_ylim(left.get_ylim())
    legend(figure)
    caption = (
        f"Retention and Acquisition after every epoch, and the path of both, on the scale of the left panel. "
        f"A = {found.scale.anchors}, learning rate {found.scale.base.lr:g}. Error bars are standard errors, "
        f"{counted(drawn)}."
    )
    return Picture(label="fig:epoch-level-dynamics", paper="Fig. 12", caption=caption, figure=figure)


def fig_gentle_start(found: Collected) -> Picture:
    """The path of Acquisition and Retention at a constant rate and with a warm-up (E13)."""
    own = found.studies["e13"].runs
    figure, axes = sheet(2, width=4.0, height=2.9, share=True)
    for axis, (title, warm) in zip(axes, (("constant rate", False), ("gentle start", True)), strict=True):
        _path(axis, [result for result in own if bool(result.spec.warmup) == warm])
        axis.set(title=title)
    axes[1].set_ylabel("")
    for method in e13.METHODS:
        colour, marker = look(method)
        axes[0].plot([], [], color=colour, marker=marker, label=method_name(method))
    legend(figure)
    drawn = [row.figures["final retention"] for row in found.studies["e13"].summary.rows]
    caption = (
        f"The path of Acquisition and Retention, epoch by epoch, at a constant learning rate and at one that rises "
        f"over {e13.SHARE:.0%} of the updates. Large markers are the first epoch with full Acquisition. Means, "
        f"{counted(drawn)}."
    )
    return Picture(label="fig:gentle-start", paper="Added here", caption=caption, figure=figure)
