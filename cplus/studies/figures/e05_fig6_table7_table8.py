"""E5, a sequence of tasks: accuracy stage by stage (Fig. 6, Table 7) and at the end (Table 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cplus.evaluation.statistics import Estimate, estimate
from cplus.experiment.record import SequenceResult
from cplus.studies.collected import Collected
from cplus.studies.e05 import METHODS, average
from cplus.studies.figures.drawing import Picture, Points, estimates_of, legend, lines, method_name, panels, seed_count
from cplus.studies.figures.tables import (
    Cell,
    ComparisonLine,
    Table,
    cell,
    joined,
    joined_names,
    joined_numbers,
    published_numbers,
)


def fig_sequential_multitask(found: Collected) -> Picture:
    """The accuracy on every task met so far, stage by stage, and their average.

    Paper: Fig. 6.
    """
    own, tasks = found.studies["e05"].sequences, found.scale.tasks
    columns = len(tasks) + 1 if len(tasks) < 4 else 3
    figure, axes = panels(columns, -(-(len(tasks) + 1) // columns), width=3.0, height=2.3, share=True)
    drawn: list[Estimate] = []
    for index, (axis, task) in enumerate(zip(axes, (*tasks, "average"), strict=False)):
        series = {method: _stages(own, method, index, len(tasks)) for method in METHODS}
        lines(axis, series)
        axis.set(title="all tasks so far" if task == "average" else task, xlim=(0.6, len(tasks) + 0.4))
        axis.set_xticks(range(1, len(tasks) + 1), [f"{n}" for n in range(1, len(tasks) + 1)])
        axis.set_xlabel("tasks learned")
        drawn += estimates_of(series)
    for axis in axes[len(tasks) + 1 :]:
        axis.set_axis_off()
    for axis in axes[::columns]:
        axis.set_ylabel("accuracy (%)")
    legend(figure)
    caption = (
        f"Accuracy on each task from the stage that learns it, in the order {' → '.join(tasks)}; the last panel is the "
        f"unweighted mean over the tasks met. The first stage is shared. Means and standard errors, "
        f"{seed_count(drawn)}."
    )
    return Picture(label="fig:sequential-multitask", paper="Fig. 6", caption=caption, figure=figure)


def _stages(results: Sequence[SequenceResult], method: str, index: int, count: int) -> Points:
    """The accuracy on one task after each stage from its own on; the index after the last task is the average."""
    own = [result for result in results if result.spec.method == method]
    if not own:
        return []
    if index == count:
        return [(n, estimate([average(result, n) for result in own])) for n in range(1, count + 1)]
    return [(n, estimate([result.accuracy[n][index] for result in own])) for n in range(index + 1, count + 1)]


def tab_sequential_stage_summary(found: Collected) -> Table:
    """Average accuracy over the tasks met so far, after each stage.

    Paper: Table 7.
    """
    tasks = found.scale.tasks[1:]
    rows, drawn = _rows(found, [f"average after {task}" for task in tasks], published_numbers("e05"))
    return Table(
        label="tab:sequential-stage-summary",
        paper="Table 7",
        caption=f"Average Task Accuracy (%), {seed_count(drawn)}. Published: after arc_c, mmlu, medqa, three seeds.",
        columns=("Method", *(f"After {task}" for task in tasks)),
        rows=rows,
    )


def tab_sequential_final(found: Collected) -> Table:
    """Accuracy on every task after the last stage, and their average.

    Paper: Table 8.
    """
    tasks, averages, final = found.scale.tasks, published_numbers("e05"), published_numbers("e05", 1)
    columns = [*(f"{task} at the end" for task in tasks), f"average after {tasks[-1]}"]
    rows, drawn = _rows(found, columns, {method: (*final[method], averages[method][-1]) for method in METHODS})
    return Table(
        label="tab:sequential-final",
        paper="Table 8",
        caption=f"Accuracy (%) at the end, {seed_count(drawn)}. Published: csqa, arc_c, mmlu, medqa, three seeds.",
        columns=("Method", *tasks, "Average"),
        rows=rows,
    )


def _rows(
    found: Collected, figures: Sequence[str], published: Mapping[str, Sequence[float]]
) -> tuple[tuple[tuple[str | Cell, ...], ...], list[Estimate | None]]:
    """One row per method; published numbers only where the sequence has as many tasks as the paper's."""
    measured = _summary_figures(found)
    rows: list[tuple[str | Cell, ...]] = []
    drawn: list[Estimate | None] = []
    for method in METHODS:
        own = [measured.get(method, {}).get(name) for name in figures]
        paper = published[method] if len(found.scale.tasks) == 4 else (None,) * len(figures)
        rows.append((method_name(method), *map(cell, own, paper)))
        drawn += own
    return tuple(rows), drawn


def _summary_figures(found: Collected) -> dict[str, Mapping[str, Estimate]]:
    return {row.at["method"]: row.figures for row in found.studies["e05"].summary.rows}


def comparison(found: Collected) -> list[ComparisonLine]:
    """The average accuracy after the last task, with the paper's."""
    last, measured = f"average after {found.scale.tasks[-1]}", _summary_figures(found)
    return [
        ComparisonLine(
            what=f"average accuracy at the end, {joined_names(METHODS)} (%)",
            measured=joined([measured.get(method, {}).get(last) for method in METHODS]),
            published=joined_numbers([published_numbers("e05")[method][-1] for method in METHODS]),
        )
    ]


FIGURES = (fig_sequential_multitask,)
TABLES = (tab_sequential_stage_summary, tab_sequential_final)
