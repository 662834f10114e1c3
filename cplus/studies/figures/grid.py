"""The figures of E1: Retention by anchor budget, place by place and by model size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cplus.evaluation.statistics import Estimate, estimate
from cplus.experiment.record import RunResult, RunSpec
from cplus.studies.collected import Collected
from cplus.studies.e01 import at_budgets, macro, recovered
from cplus.studies.figures import outside
from cplus.studies.figures.drawing import (
    INK,
    PALETTE,
    Picture,
    Points,
    across,
    budgets,
    counted,
    empty,
    legend,
    line,
    lines,
    sheet,
    size,
)
from cplus.studies.scales import MAIN, SCARCE, same_family
from cplus.studies.summaries import Figure, by_seed, margin, over_seeds, pick, retained, shown, table


def by_budget(results: Sequence[RunResult], method: str, figure: Figure = retained) -> Points:
    """A method's figure at each budget, fewest anchors first."""
    rows = table(pick(results, method=method), ("num_anchors",), {"value": figure})
    return sorted((row.at["num_anchors"], row.figures["value"]) for row in rows if row.figures)


def fig_problem_motivation(found: Collected) -> Picture:
    """Retention by budget, and the change on tasks that are neither trained on nor anchors.

    Paper: Fig. 1.
    """
    place = found.scale.places[0]
    figure, (left, right) = sheet(2, width=4.2, height=3.0)
    here = pick(found.studies["e01"].runs, model=place.model, task=place.task)
    drawn = _curves(left, here, place.budgets, ("replay", "cpl", "cplus"))
    left.set(ylabel="Retention (%)", title=f"(a) {place.model} adapted to {place.task}")
    drawn += outside.profile(right, pick(found.studies["e02"].runs, task=place.task))
    right.set_title(f"(b) other tasks after {place.task}")
    legend(figure)
    caption = (
        f"(a) Retention by the number of anchors; SFT uses none. (b) Change of accuracy on tasks used neither for "
        f"training nor as anchors; diamonds are their average. Means and standard errors, {counted(drawn)}."
    )
    return Picture(label="fig:problem-motivation", paper="Fig. 1", caption=caption, figure=figure)


def fig_main_results(found: Collected) -> Picture:
    """Retention by budget, one panel a model and task.

    Paper: Fig. 3.
    """
    own = found.studies["e01"]
    places = list(dict.fromkeys((s.model, s.task) for s in own.specs if isinstance(s, RunSpec))) or [("", "")]
    columns = 4 if len(places) % 4 == 0 else min(3, len(places))
    figure, axes = sheet(columns, -(-len(places) // columns), width=3.0, height=2.3, share="row")
    drawn: list[Estimate] = []
    for axis, (model, task) in zip(axes, places, strict=False):
        asked = {s.num_anchors for s in own.specs if (s.model, s.task) == (model, task) and s.num_anchors}  # type: ignore[union-attr]
        drawn += _curves(axis, pick(own.runs, model=model, task=task), asked, MAIN[1:])
        axis.set_title(f"{model} · {task}" if model else "")
    for axis in axes[len(places) :]:
        axis.set_axis_off()
    for axis in axes[::columns]:
        axis.set_ylabel("Retention (%)")
    legend(figure)
    caption = (
        "Retention across anchor budgets, one panel a model and task; panels of a row share the vertical scale. SFT "
        f"uses no anchors and is a level line. Error bars are standard errors, {counted(drawn)}."
    )
    return Picture(label="fig:main-results", paper="Fig. 3", caption=caption, figure=figure)


def _curves(axis: Any, here: Sequence[RunResult], asked: Any, methods: Sequence[str]) -> list[Estimate]:
    """Every method's line and SFT's level."""
    plain = over_seeds(pick(here, method="sft"), retained)
    series = {method: by_budget(here, method) for method in methods}
    across(axis, plain, "sft")
    lines(axis, series)
    budgets(axis, asked)
    return [estimate for points in series.values() for _, estimate in points] + ([plain] if plain else [])


def _models(found: Collected) -> tuple[list[str], list[str]]:
    """The models of the first one's family by size, and the tasks that all of them are adapted to."""
    first = found.scale.places[0].model
    models = list(dict.fromkeys(p.model for p in found.scale.places if same_family(p.model, first)))
    models.sort(key=size)
    tasks = list(dict.fromkeys(place.task for place in found.scale.places))
    there = {(place.model, place.task) for place in found.scale.places}
    return models, [task for task in tasks if all((model, task) in there for model in models)]


def fig_model_scale_headline(found: Collected) -> Picture:
    """CPL and CPLUS with four anchors, by model.

    Paper: Fig. 9.
    """
    models, tasks = _models(found)
    figure, axes = sheet(len(tasks), width=3.6, height=2.8)
    drawn: list[Estimate] = []
    for axis, task in zip(axes, tasks, strict=True):
        here = pick(found.studies["e01"].runs, task=task, num_anchors=min(SCARCE))
        series = {method: _by_model(here, models, method) for method in ("cpl", "cplus")}
        lines(axis, series)
        for x, best in series["cplus"]:
            own = pick(here, model=models[int(x)])
            gain = margin(pick(own, method="cplus"), pick(own, method="cpl"))
            axis.annotate(shown(gain, sign=True), (x, best.mean), (0, 9), textcoords="offset points", ha="center")
        _name_models(axis, models)
        axis.margins(x=0.15, y=0.2)
        axis.set(title=task, ylabel="Retention (%)")
        drawn += [estimate for points in series.values() for _, estimate in points]
    legend(figure)
    caption = (
        f"Retention with {min(SCARCE)} anchors by model, smallest first; labels are CPLUS minus CPL in points, paired "
        f"over seeds. Means and standard errors, {counted(drawn)}."
    )
    return Picture(label="fig:model-scale-headline", paper="Fig. 9", caption=caption, figure=figure)


def _by_model(results: Sequence[RunResult], models: Sequence[str], method: str) -> Points:
    each = ((x, over_seeds(pick(results, model=model, method=method), retained)) for x, model in enumerate(models))
    return [(x, estimate) for x, estimate in each if estimate is not None]


def _name_models(axis: Any, models: Sequence[str]) -> None:
    axis.set_xticks(range(len(models)), models)
    axis.set_xlim(-0.3, len(models) - 0.7)
    axis.set_xlabel("model, by size")


def fig_model_scale(found: Collected) -> Picture:
    """What SFT keeps, what CPLUS keeps, and the share of SFT's forgetting that CPLUS recovers, by model.

    Paper: Fig. 10.
    """
    models, shared = _models(found)
    results = pick(found.studies["e01"].runs, model=tuple(models))
    figure, axes = sheet(3, width=3.0, height=2.6)
    tasks = list(dict.fromkeys(place.task for place in found.scale.places))
    drawn: list[Estimate] = []
    for colour, task in zip(PALETTE, tasks, strict=False):
        drawn += _scale_lines(axes, results, models, [task], task, colour)
    if len(shared) > 1:
        _scale_lines(axes, results, models, shared, "macro average", INK)
    titles = ("SFT: Retention (%)", "CPLUS, A = 4 and 8: Retention (%)", "SFT's forgetting recovered (%)")
    for axis, title in zip(axes, titles, strict=True):
        _name_models(axis, models)
        axis.set_title(title)
        if not drawn:
            empty(axis)
    legend(figure)
    caption = (
        "By model, smallest first: what SFT keeps, what CPLUS keeps with 4 and 8 anchors, and 100 (CPLUS - SFT) / "
        "(100 - SFT). The black line is the macro average of the tasks' lines, where all models share several tasks. "
        f"Means and standard errors, {counted(drawn)}."
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
    panels = (
        _macro_line(at_budgets(here, "sft", ()), models, tasks),
        _macro_line(at_budgets(here, "cplus", SCARCE), models, tasks),
        [(float(x), shares[model]) for x, model in enumerate(models) if model in shares],
    )
    for axis, points in zip(axes, panels, strict=True):
        line(axis, points, name, colour, "o")
    return [estimate for points in panels for _, estimate in points]


def _macro_line(results: Sequence[RunResult], models: Sequence[str], tasks: Sequence[str]) -> Points:
    """By model, the mean of the tasks' Retention, over the seeds that have every task."""
    points: list[tuple[float, Estimate]] = []
    for x, model in enumerate(models):
        own = macro([by_seed(pick(results, model=model, task=task), retained) for task in tasks])
        if own:
            points.append((x, estimate(list(own.values()))))
    return points
