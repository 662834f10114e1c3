"""E2: does preservation extend beyond the behaviour that the anchors represent?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cplus.lab.drawing import INK, colour_and_marker, joined, line, method_name, panels, picture
from cplus.lab.records import RunResult
from cplus.lab.scales import METHODS, Scale
from cplus.lab.study import Claim, Collected, ComparisonLine, Picture, Published, Summary
from cplus.lab.summaries import Metric, leads, margin, over_seeds, pick, shown, table
from cplus.training.settings import RunSpec

TITLE = "Beyond the represented target"
QUESTION = "Does preservation extend beyond the behaviour represented by the anchors?"
PAPER = "Sec. 4.3; Figs. 1 (b), 4, 16; App. E.10"
SEC_4_3 = Published(
    "Sec. 4.3, CPLUS's mean change on outside benchmarks, points", {"arc_c": 1.15, "mmlu": 0.88, "medqa": 0.14}
)


def runs(scale: Scale) -> list[RunSpec]:
    """The first model adapted to each task, as in E1, and evaluated on tasks it was not trained on."""
    axes = {"method": METHODS, "seed": range(scale.seeds_where_five)}
    mine = [cell for cell in scale.grid if cell.model == scale.grid[0].model]
    return [spec for cell in mine for spec in scale.each(axes, **cell.place)]


def change(result: RunResult) -> float | None:
    """The mean change of accuracy over the outside tasks, in points."""
    changes = [task["after"] - task["before"] for task in result.external.values()]
    return sum(changes) / len(changes) if changes else None


def change_on(task: str, *, relative: bool = False) -> Metric:
    """The change of accuracy on one outside task, or the accuracy after in percent of that before."""

    def metric(result: RunResult) -> float | None:
        found = result.external.get(task)
        if found is None or (relative and not found["before"]):
            return None
        return 100.0 * found["after"] / found["before"] if relative else found["after"] - found["before"]

    return metric


def summary(mine: Sequence[RunResult]) -> Summary:
    """Change of outside accuracy by adaptation task and method."""
    outside = sorted({name for result in mine for name in result.external})
    figures: dict[str, Metric] = {
        "change": change,
        "kept": lambda result: result.external_kept,
        **{f"change on {name}": change_on(name) for name in outside},
    }
    rows = table(mine, ("task", "method"), figures)
    ours = pick(mine, method="cplus")
    rises = "outside tasks: CPLUS's accuracy rises above the base model's"
    claims = (
        Claim(rises, over_seeds(ours, change), paper="Sec. 4.3"),
        *leads("outside tasks: CPLUS loses less than {}", mine, METHODS[:-1], change, paper="Sec. 4.3; Figs. 1 (b), 4"),
    )
    moved = {name: shown(over_seeds(pick(mine, method=name), change), sign=True) for name in METHODS}
    gap = shown(margin(ours, pick(mine, method="cpl"), change), sign=True)
    answer = (
        f"On tasks used neither for training nor as anchors CPLUS changes accuracy by {moved['cplus']} points, CPL by "
        f"{moved['cpl']} and SFT by {moved['sft']}: CPLUS minus CPL is {gap} points."
    )
    return Summary(rows=rows, answer=answer, claims=claims)


# E2, beyond the represented target: the change on tasks that are neither trained on nor anchors (Figs. 4, 16).


def draw_outside_changes(axis: Any, here: Sequence[RunResult]) -> None:
    """The change on every outside task by method, and their average as diamonds; also panel (b) of Fig. 1."""
    tasks = sorted({name for result in here for name in result.external})
    for number, method in enumerate(METHODS):
        own, (colour, marker) = pick(here, method=method), colour_and_marker(method)
        for x, metric in enumerate((*map(change_on, tasks), change)):
            average, found = x == len(tasks), over_seeds(own, metric)
            points = [(x + 0.14 * (number - 1.5), found)] if found else []
            name, shape, size = (None, "D", 6) if average else (method_name(method), marker, 4.5)
            line(axis, points, name, colour, shape, markersize=size, linestyle="none")
    if here:
        axis.axhline(0.0, color=INK, linewidth=0.8)
    axis.set_xticks(range(len(tasks) + 1), [*tasks, "average"])
    axis.set_ylabel("change of accuracy (points)")


def fig_medqa_broader_capability(found: Collected) -> Picture:
    """The change on outside tasks after adapting to each task but the first.

    Paper: Fig. 4.
    """
    grid = found.scale.grid
    first, *others = [cell.task for cell in grid if cell.model == grid[0].model]
    tasks = others or [first]
    figure, axes = panels(len(tasks), width=3.4, height=2.7)
    for axis, task in zip(axes, tasks, strict=True):
        draw_outside_changes(axis, pick(found.studies["e02"].results, task=task))
        axis.set_title(f"after {task}")
        axis.tick_params(axis="x", labelrotation=20)
        axis.set_ylabel(axis.get_ylabel() if axis is axes[0] else "")
    caption = (
        "Change of accuracy from the base model on tasks used neither for training nor as anchors, by the task that "
        "was learned; diamonds are averages. Each panel has its own range."
    )
    return picture(figure, "fig:medqa-broader-capability", "Fig. 4", caption)


def fig_broader_capability_appendix(found: Collected) -> Picture:
    """Scores on outside tasks in percent of the base model's, one axis per task.

    Paper: Fig. 16.
    """
    here = pick(found.studies["e02"].results, task=found.scale.grid[0].task)
    tasks = sorted({name for result in here for name in result.external})
    figure, [axis] = panels(1, width=5.2, height=4.05, subplot_kw={"projection": "polar"})
    angles = [2 * math.pi * i / max(1, len(tasks)) for i in range(len(tasks))]
    for method in METHODS:
        scores = [over_seeds(pick(here, method=method), change_on(task, relative=True)) for task in tasks]
        known = [(angle, score) for angle, score in zip(angles, scores, strict=True) if score is not None]
        colour, marker = colour_and_marker(method)
        line(axis, known, None, colour, "none", linestyle="none")
        if known:
            around, heights = zip(*((angle, score.mean) for angle, score in (*known, known[0])), strict=True)
            axis.plot(around, heights, color=colour, marker=marker, label=method_name(method))
    if values := [estimate.mean for estimate in figure.estimates]:
        circle = [2 * math.pi * i / 120 for i in range(121)]
        axis.plot(circle, [100.0] * 121, color=INK, linestyle="--", linewidth=1.0, label="base model")
        low, high = min(*values, 100.0), max(*values, 100.0)
        room = max(1.0, 0.15 * (high - low))  # a radial range in which the differences are visible
        axis.set_ylim(low - 2 * room, high + room)
    axis.set_xticks(angles, tasks)
    axis.grid(visible=True)
    caption = (
        f"Scores after adapting to {found.scale.grid[0].task}, in percent of the base model's score on each task; "
        "the dashed line is 100 %. The radial axis does not begin at 0."
    )
    return picture(figure, "fig:broader-capability-appendix", "Fig. 16", caption)


def comparison(found: Collected) -> list[ComparisonLine]:
    """The mean change on outside tasks by method, then CPLUS's after each task, with the paper's."""
    own, paper = found.studies["e02"], SEC_4_3.numbers
    changes = ", ".join(f"{value:+.2f} after {task}" for task, value in paper.items())
    measured = joined([over_seeds(pick(own.results, method=m), change) for m in ("sft", "cpl", "cplus")], sign=True)
    lines = [ComparisonLine("change on outside tasks, SFT / CPL / CPLUS (points)", measured, f"CPLUS {changes}")]
    for task in dict.fromkeys(spec.task for spec in own.specs):
        measured = shown(over_seeds(pick(own.results, method="cplus", task=task), change), sign=True)
        published = f"{paper[task]:+.2f}" if task in paper else "other tasks"
        lines.append(ComparisonLine(f"CPLUS after {task} (points)", measured, published))
    return lines
