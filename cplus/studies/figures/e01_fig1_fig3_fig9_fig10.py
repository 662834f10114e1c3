"""E1, limited anchors: Retention by anchor budget (Figs. 1, 3) and by model size (Figs. 9, 10)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cplus.evaluation.statistics import Estimate, estimate
from cplus.experiment.record import RunResult
from cplus.experiment.settings import RunSpec
from cplus.studies.collected import Collected
from cplus.studies.e01 import ALL_ANCHORS, at_budgets, gain, limited, macro, recovered, wins, with_all
from cplus.studies.figures.drawing import (
    INK,
    PALETTE,
    Picture,
    Points,
    budget_axis,
    by_budget,
    colour_and_marker,
    estimates_of,
    legend,
    level_line,
    line,
    lines,
    mark_not_run,
    method_name,
    model_size,
    panels,
    seed_count,
)
from cplus.studies.figures.e02_fig4_fig16 import draw_outside_changes
from cplus.studies.figures.tables import ComparisonLine, published_numbers
from cplus.studies.scales import MAIN, SCARCE, family, same_family
from cplus.studies.summaries import by_seed, learned, margin, over_seeds, pick, retained, shown


def fig_main_results(found: Collected) -> Picture:
    """Retention by budget, one panel per model and task.

    Paper: Fig. 3.
    """
    own = found.studies["e01"]
    specs = [spec for spec in own.specs if isinstance(spec, RunSpec)]
    places = list(dict.fromkeys((spec.model, spec.task) for spec in specs)) or [("", "")]
    columns = 4 if len(places) % 4 == 0 else min(3, len(places))
    figure, axes = panels(columns, -(-len(places) // columns), width=3.0, height=2.3, share="row")
    drawn: list[Estimate] = []
    for axis, (model, task) in zip(axes, places, strict=False):
        budgets = {s.num_anchors for s in specs if (s.model, s.task) == (model, task) and s.num_anchors}
        drawn += _curves(axis, limited(pick(own.runs, model=model, task=task)), budgets, MAIN[1:])
        axis.set_title(f"{model} · {task}" if model else "")
    for axis in axes[len(places) :]:
        axis.set_axis_off()
    for axis in axes[::columns]:
        axis.set_ylabel("Retention (%)")
    legend(figure)
    caption = (
        "Retention across anchor budgets, one panel a model and task; panels of a row share the vertical scale. SFT "
        f"uses no anchors and is a level line. Error bars are standard errors, {seed_count(drawn)}."
    )
    return Picture(label="fig:main-results", paper="Fig. 3", caption=caption, figure=figure)


def fig_problem_motivation(found: Collected) -> Picture:
    """Retention by budget, and the change on tasks that are neither trained on nor anchors.

    Paper: Fig. 1.
    """
    first = found.scale.grid[0]
    figure, (left, right) = panels(2, width=4.2, height=3.0)
    here = pick(found.studies["e01"].runs, model=first.model, task=first.task)
    drawn = _curves(left, limited(here), first.budgets, ALL_ANCHORS)
    drawn += _at_all(left, with_all(here), first.budgets)
    left.set(ylabel="Retention (%)", title=f"(a) {first.model} adapted to {first.task}")
    drawn += draw_outside_changes(right, pick(found.studies["e02"].runs, task=first.task))
    right.set_title(f"(b) other tasks after {first.task}")
    legend(figure)
    caption = (
        f"(a) Retention by the number of anchors, at the right with every past row; SFT uses none. (b) Change of "
        "accuracy on tasks used neither for training nor as anchors; diamonds are their average. Means and standard "
        f"errors, {seed_count(drawn)}."
    )
    return Picture(label="fig:problem-motivation", paper="Fig. 1", caption=caption, figure=figure)


def _curves(axis: Any, here: Sequence[RunResult], budgets: Iterable[int], methods: Sequence[str]) -> list[Estimate]:
    """Every method's line and SFT's level."""
    plain = over_seeds(pick(here, method="sft"), retained)
    series = {method: by_budget(here, method) for method in methods}
    level_line(axis, plain, "sft")
    lines(axis, series)
    budget_axis(axis, budgets)
    return estimates_of(series) + ([plain] if plain else [])


def _at_all(axis: Any, results: Sequence[RunResult], budgets: Sequence[int]) -> list[Estimate]:
    """The methods with every past row as an anchor, at the number of past rows; the lines lead there."""
    counts = [result.counts["anchors"] for result in results]
    if not counts:
        return []
    x = round(sum(counts) / len(counts))
    drawn = []
    for method in ALL_ANCHORS:
        found = over_seeds(pick(results, method=method), retained)
        if found is not None:
            colour, marker = colour_and_marker(method)
            line(axis, [(x, found)], method_name(method), colour, marker, linestyle="none", markerfacecolor="none")
            drawn.append(found)
    axis.set_xticks([*budgets, x], [*map(str, budgets), f"all\n({x})"])
    return drawn


def fig_model_scale_headline(found: Collected) -> Picture:
    """CPL and CPLUS with four anchors, by model.

    Paper: Fig. 9.
    """
    models, tasks = _models_and_shared_tasks(found)
    figure, axes = panels(len(tasks), width=3.6, height=2.8)
    drawn: list[Estimate] = []
    for axis, task in zip(axes, tasks, strict=True):
        here = pick(found.studies["e01"].runs, task=task, num_anchors=min(SCARCE))
        series = {method: _by_model(here, models, method) for method in ("cpl", "cplus")}
        lines(axis, series)
        for x, best in series["cplus"]:
            own = pick(here, model=models[int(x)])
            lead = margin(pick(own, method="cplus"), pick(own, method="cpl"))
            axis.annotate(shown(lead, sign=True), (x, best.mean), (0, 9), textcoords="offset points", ha="center")
        _model_axis(axis, models)
        axis.margins(x=0.15, y=0.2)
        axis.set(title=task, ylabel="Retention (%)")
        drawn += estimates_of(series)
    legend(figure)
    caption = (
        f"Retention with {min(SCARCE)} anchors by model, smallest first; labels are CPLUS minus CPL in points, paired "
        f"over seeds. Means and standard errors, {seed_count(drawn)}."
    )
    return Picture(label="fig:model-scale-headline", paper="Fig. 9", caption=caption, figure=figure)


def _models_and_shared_tasks(found: Collected) -> tuple[list[str], list[str]]:
    """The models of the first one's family by size, and the tasks that all of them are adapted to."""
    grid = found.scale.grid
    models = list(dict.fromkeys(cell.model for cell in grid if same_family(cell.model, grid[0].model)))
    models.sort(key=model_size)
    tasks = list(dict.fromkeys(cell.task for cell in grid))
    run = {(cell.model, cell.task) for cell in grid}
    return models, [task for task in tasks if all((model, task) in run for model in models)]


def _by_model(results: Sequence[RunResult], models: Sequence[str], method: str) -> Points:
    each = ((x, over_seeds(pick(results, model=model, method=method), retained)) for x, model in enumerate(models))
    return [(x, found) for x, found in each if found is not None]


def _model_axis(axis: Any, models: Sequence[str]) -> None:
    axis.set_xticks(range(len(models)), models)
    axis.set_xlim(-0.3, len(models) - 0.7)
    axis.set_xlabel("model, by size")


def fig_model_scale(found: Collected) -> Picture:
    """Retention of SFT and of CPLUS, and the share of SFT's forgetting that CPLUS recovers, by model.

    Paper: Fig. 10.
    """
    models, shared = _models_and_shared_tasks(found)
    results = pick(found.studies["e01"].runs, model=tuple(models))
    figure, axes = panels(3, width=3.0, height=2.6)
    tasks = list(dict.fromkeys(cell.task for cell in found.scale.grid))
    drawn: list[Estimate] = []
    for colour, task in zip(PALETTE, tasks, strict=False):
        drawn += _scale_lines(axes, results, models, [task], task, colour)
    if len(shared) > 1:
        _scale_lines(axes, results, models, shared, "macro average", INK)
    titles = ("SFT: Retention (%)", "CPLUS, A = 4 and 8: Retention (%)", "SFT's forgetting recovered (%)")
    for axis, title in zip(axes, titles, strict=True):
        _model_axis(axis, models)
        axis.set_title(title)
        if not drawn:
            mark_not_run(axis)
    legend(figure)
    caption = (
        "By model, smallest first: what SFT keeps, what CPLUS keeps with 4 and 8 anchors, and 100 (CPLUS - SFT) / "
        "(100 - SFT). The black line is the macro average of the tasks' lines, where all models share several tasks. "
        f"Means and standard errors, {seed_count(drawn)}."
    )
    return Picture(label="fig:model-scale", paper="Fig. 10", caption=caption, figure=figure)


def _scale_lines(
    axes: Sequence[Any],
    results: Sequence[RunResult],
    models: Sequence[str],
    tasks: Sequence[str],
    name: str,
    colour: str,
) -> list[Estimate]:
    """One task's line in each of the three panels, or the macro average of several tasks' lines."""
    here = pick(results, task=tuple(tasks))
    shares = {row.at["model"]: row.figures["recovery"] for row in recovered(here)}
    each = (
        macro_line(at_budgets(here, "sft", ()), models, tasks),
        macro_line(at_budgets(here, "cplus", SCARCE), models, tasks),
        [(float(x), shares[model]) for x, model in enumerate(models) if model in shares],
    )
    for axis, points in zip(axes, each, strict=True):
        line(axis, points, name, colour, "o")
    return [found for points in each for _, found in points]


def macro_line(results: Sequence[RunResult], models: Sequence[str], tasks: Sequence[str]) -> Points:
    """By model, the mean of the tasks' Retention, over the seeds that have every task."""
    points: list[tuple[float, Estimate]] = []
    for x, model in enumerate(models):
        own = macro([by_seed(pick(results, model=model, task=task), retained) for task in tasks])
        if own:
            points.append((x, estimate(list(own.values()))))
    return points


def comparison(found: Collected) -> list[ComparisonLine]:
    """Mean gain, settings led, share of forgetting recovered and Acquisition, with the paper's."""
    runs = limited(found.studies["e01"].runs)
    won, total = wins(runs)
    rows = sorted(recovered(family(runs)), key=lambda row: model_size(row.at["model"]))
    shares = {row.at["model"]: row.figures["recovery"] for row in rows}
    paper, paper_shares = published_numbers("e01"), published_numbers("e01", 1)
    return [
        ComparisonLine(
            what="CPLUS minus each setting's strongest baseline at A = 4 and 8 (points of Retention)",
            measured=shown(gain(family(runs), retained), sign=True),
            published=f"+{paper['mean gain at A in {4, 8}, Qwen3']:.2f}",
        ),
        ComparisonLine(
            what="settings in which CPLUS keeps most",
            measured=f"{won} of {total}" if total else "not run",
            published=f"{paper['settings led, Qwen3']} and {paper['settings led, Gemma and Phi']}",
        ),
        ComparisonLine(
            what="SFT's forgetting recovered at A = 4 and 8 (%)",
            measured=", ".join(f"{model} {shown(each)}" for model, each in shares.items()) or "not run",
            published=", ".join(f"{model} {value}" for model, value in paper_shares.items()),
        ),
        ComparisonLine(
            what="Acquisition of CPLUS (%)",
            measured=shown(over_seeds(pick(runs, method="cplus"), learned)),
            published=f"{paper['acquisition']:g}",
        ),
    ]


FIGURES = (fig_main_results, fig_problem_motivation, fig_model_scale_headline, fig_model_scale)
TABLES = ()
