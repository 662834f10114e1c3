"""E5: does CPLUS remain effective when tasks are learned one after another?"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any

from cplus.evaluation.statistics import Estimate, estimate
from cplus.lab import drawing
from cplus.lab.records import SequenceResult
from cplus.lab.scales import METHODS, Scale, seedless
from cplus.lab.study import Claim, Collected, ComparisonLine, Picture, Published, Summary, SummaryRow, Table
from cplus.lab.summaries import Seed, difference, mean_of, seed_of, shown
from cplus.training.settings import Recipe, SequenceSpec

TITLE = "A sequence of tasks"
QUESTION = "Does CPLUS remain effective in the tested task sequence?"
PAPER = "Sec. 4.5; Fig. 6; Tables 7, 8; App. E.9"
TABLE_7 = Published(
    "Table 7, average accuracy after arc_c, mmlu, medqa",
    {
        "sft": (66.81, 72.20, 61.21),
        "replay": (72.04, 77.29, 69.73),
        "cpl": (75.18, 70.77, 69.65),
        "cplus": (83.94, 80.86, 78.87),
    },
)
TABLE_8 = Published(
    "Table 8, final accuracy on csqa, arc_c, mmlu, medqa",
    {
        "sft": (36.04, 53.78, 74.82, 80.19),
        "replay": (55.29, 63.86, 79.59, 80.19),
        "cpl": (59.85, 62.60, 74.38, 81.77),
        "cplus": (69.34, 78.27, 83.43, 84.45),
    },
)


def runs(scale: Scale) -> list[SequenceSpec]:
    """All tasks in order with every method, from one shared checkpoint after the first task."""
    found = []
    for method, seed in product(METHODS, range(scale.seeds_where_three)):
        run = scale.at(method=method, seed=seed)
        shared = {field.name: getattr(run, field.name) for field in fields(Recipe)} | {"seed": seed}
        spec = SequenceSpec(**shared, tasks=scale.tasks, num_rows=scale.sequence_rows)
        found.append(replace(spec, seed=0) if seedless(spec) else spec)
    return found


def average(result: SequenceResult, stage: int) -> float:
    """The unweighted mean accuracy over the tasks met up to a stage.

    Paper: Sec. 4.1, Average Task Accuracy.
    """
    return statistics.fmean(result.accuracy[stage][:stage])


def kept(result: SequenceResult) -> float:
    """The share of earlier tasks' rows that are right before a stage and still right after it, mean over stages."""
    return statistics.fmean(stage["retention"] for stage in result.stages if stage["retention"] is not None)


def summary(mine: Sequence[SequenceResult]) -> Summary:
    """Average accuracy after each stage, final accuracy on every task, and CPLUS against the other methods."""
    by_method = {method: [r for r in mine if r.spec.method == method] for method in METHODS}
    ends = {m: {seed_of(r): average(r, len(r.spec.tasks)) for r in own} for m, own in by_method.items()}
    stays = {m: {seed_of(r): kept(r) for r in own} for m, own in by_method.items()}
    rows = tuple(_row(method, own) for method, own in by_method.items() if own)
    above = "CPLUS's average accuracy at the end is above {}'s"
    more = "CPLUS keeps more of the earlier tasks' right rows than {}, mean over stages"
    each = "CPLUS's accuracy on {} at the end is above the best other method's"
    last = {
        task: {m: {seed_of(r): r.accuracy[-1][i] for r in own} for m, own in by_method.items()}
        for i, task in enumerate(mine[0].spec.tasks if mine else ())
    }
    claims = (
        *(Claim(above.format(m), difference(ends["cplus"], ends[m]), "Sec. 4.5; Table 7") for m in METHODS[:-1]),
        *(Claim(more.format(m), difference(stays["cplus"], stays[m])) for m in METHODS[:-1]),
        *(Claim(each.format(task), lead_over_best(own)[1], "Sec. 4.5; Table 8") for task, own in last.items()),
    )
    best, gain = lead_over_best(ends)
    answer = (
        f"After the last task CPLUS answers {shown(mean_of(ends['cplus']))} % of all tasks' rows correctly, the best "
        f"other method ({best}) {shown(mean_of(ends.get(best or '', {})))} %: a difference of "
        f"{shown(gain, sign=True)} points; "
        f"each stage keeps {shown(mean_of(stays['cplus']))} % of the correct answers to earlier tasks under CPLUS, "
        f"{shown(mean_of(stays['cpl']))} % under CPL."
    )
    return Summary(rows=rows, answer=answer, claims=claims)


def lead_over_best(values: Mapping[str, Mapping[Seed, float]]) -> tuple[str | None, Estimate | None]:
    """The best of the other methods, and how far CPLUS is above it."""
    others = {name: statistics.fmean(own.values()) for name, own in values.items() if own and name != "cplus"}
    best = max(others, key=others.__getitem__, default=None)
    return best, None if best is None else difference(values["cplus"], values[best])


def _row(method: str, own: Sequence[SequenceResult]) -> SummaryRow:
    tasks = own[0].spec.tasks
    figures = {f"average after {task}": [average(r, stage) for r in own] for stage, task in enumerate(tasks, start=1)}
    figures |= {f"{task} at the end": [r.accuracy[-1][i] for r in own] for i, task in enumerate(tasks)}
    figures["acquisition"] = [statistics.fmean(stage["acquisition"] for stage in r.stages) for r in own]
    figures["kept by a stage"] = [kept(result) for result in own]
    return SummaryRow(at={"method": method}, figures={name: estimate(values) for name, values in figures.items()})


# E5, a sequence of tasks: accuracy stage by stage (Fig. 6, Table 7) and at the end (Table 8).


def fig_sequential_multitask(found: Collected) -> Picture:
    """The accuracy on every task met so far, stage by stage, and their average.

    Paper: Fig. 6.
    """
    own, tasks = found.studies["e05"].results, found.scale.tasks
    columns, count = len(tasks) + 1 if len(tasks) < 4 else 3, len(tasks) + 1
    figure, axes = drawing.panels(count, columns, width=3.0, height=2.3, share=True, ylabel="accuracy (%)")
    for index, (axis, task) in enumerate(zip(axes, (*tasks, "all tasks so far"), strict=True)):
        drawing.lines(axis, {method: _stages(own, method, index, len(tasks)) for method in METHODS})
        axis.set(title=task, xlim=(0.6, len(tasks) + 0.4))
        axis.set_xticks(range(1, len(tasks) + 1), [f"{n}" for n in range(1, len(tasks) + 1)])
        axis.set_xlabel("tasks learned")
    caption = (
        f"Accuracy on each task from the stage that learns it, in the order {' → '.join(tasks)}; the last panel is the "
        "unweighted mean over the tasks met. The first stage is shared."
    )
    return drawing.picture(figure, "fig:sequential-multitask", "Fig. 6", caption)


def _stages(results: Sequence[SequenceResult], method: str, index: int, count: int) -> drawing.Points:
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
    columns = ("Method", *(f"After {task}" for task in tasks))
    rows = _rows(found, [f"average after {task}" for task in tasks], TABLE_7.numbers)
    words = "Average Task Accuracy (%)", "Published: after arc_c, mmlu, medqa, three seeds."
    return drawing.measured_table("tab:sequential-stage-summary", "Table 7", columns, rows, *words)


def tab_sequential_final(found: Collected) -> Table:
    """Accuracy on every task after the last stage, and their average.

    Paper: Table 8.
    """
    tasks, averages, final = found.scale.tasks, TABLE_7.numbers, TABLE_8.numbers
    figures = [*(f"{task} at the end" for task in tasks), f"average after {tasks[-1]}"]
    rows = _rows(found, figures, {method: (*final[method], averages[method][-1]) for method in METHODS})
    columns = ("Method", *tasks, "Average")
    words = "Accuracy (%) at the end", "Published: csqa, arc_c, mmlu, medqa, three seeds."
    return drawing.measured_table("tab:sequential-final", "Table 8", columns, rows, *words)


def _rows(found: Collected, figures: Sequence[str], published: Mapping[str, Sequence[float]]) -> list[drawing.Row]:
    """One row per method; published numbers only where the sequence has as many tasks as the paper's."""
    measured = {row.at["method"]: row.figures for row in found.studies["e05"].summary.rows}
    none = (None,) * len(figures)
    papers: Mapping[str, Sequence[Any]] = published if len(found.scale.tasks) == 4 else dict.fromkeys(METHODS, none)
    return [
        ((drawing.method_name(m),), [measured.get(m, {}).get(name) for name in figures], papers[m]) for m in METHODS
    ]


def comparison(found: Collected) -> list[ComparisonLine]:
    """The average accuracy after the last task, with the paper's."""
    last, numbers = f"average after {found.scale.tasks[-1]}", TABLE_7.numbers
    rows = _rows(found, [last], {method: numbers[method][-1:] for method in METHODS})
    what = f"average accuracy at the end, {drawing.joined_names(METHODS)} (%)"
    published = drawing.joined_numbers([numbers[method][-1] for method in METHODS])
    return [ComparisonLine(what, drawing.joined([found[0] for _, found, _ in rows]), published)]
