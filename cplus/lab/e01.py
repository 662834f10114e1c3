"""E1: does CPLUS reduce forgetting when anchors are limited?"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from cplus.evaluation.changes import recovery
from cplus.evaluation.statistics import Estimate, estimate
from cplus.lab.drawing import (
    INK,
    PALETTE,
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
from cplus.lab.e02 import draw_outside_changes
from cplus.lab.records import Result, RunResult
from cplus.lab.scales import BASELINES, MAIN, SCARCE, Scale, family, same_family
from cplus.lab.study import (
    Claim,
    Collected,
    ComparisonLine,
    Picture,
    Published,
    Study,
    Summary,
    SummaryRow,
    run_results,
)
from cplus.lab.summaries import (
    Metric,
    Seed,
    above,
    by_seed,
    difference,
    differences,
    free_text,
    leads,
    learned,
    margin,
    mean_of,
    over_seeds,
    paired,
    pick,
    retained,
    retention_measure,
    shown,
    strongest,
    table,
)
from cplus.training.settings import RunSpec

ALL_ANCHORS = ("replay", "cpl", "cplus")
"""The methods of Fig. 1 (a), also run with every past row as an anchor."""


def runs(scale: Scale) -> list[RunSpec]:
    """Every method at every model, task, budget and seed; SFT has no budget, and one run if the seed has no effect.

    For the first model and task also with every past row as an anchor.
    """
    first, seeds = scale.grid[0], range(scale.seeds_where_five)
    place = {"model": first.model, "task": first.task, "lr": first.lr}
    whole = () if scale.base.interface == "freeform" else ALL_ANCHORS  # its past rows are another task's
    return [
        *(
            scale.at(model=cell.model, task=cell.task, lr=cell.lr, method=method, num_anchors=budget, seed=seed)
            for cell in scale.grid
            for budget in cell.budgets
            for method in MAIN
            for seed in seeds
        ),
        *(
            scale.at(**place, method=m, num_anchors=0, all_anchors=True, external=(), seed=s)
            for m in whole
            for s in seeds
        ),
    ]


def summary(results: Sequence[Result]) -> Summary:
    """Retention by model, task, budget and method; CPLUS against each baseline at scarce anchors; model scale.

    For free text, the rise of the past answers' loss at matched learning takes the place of Retention.
    """
    everything = run_results(results)
    mine = limited(everything)
    kept, free = retention_measure(mine), free_text(mine)
    budgets = tried(mine) if free else SCARCE
    listed = " and ".join(map(str, budgets))
    rows = (
        *table(mine, ("model", "task", "method", "num_anchors"), kept.columns),
        *table(with_all(everything), ("model", "task", "method", "all_anchors"), kept.columns),
    )
    lead, (won, total), scales = gain(family(mine), kept.metric), wins(mine), recovered(family(mine))
    claims = [
        Claim(
            f"CPLUS {kept.better_than} each setting's strongest baseline, mean over A = {listed}",
            lead,
            paper=None if free else "Sec. 4.2",
        ),
        *(
            above(
                f"CPLUS {kept.better_than} {name}, A={budget}",
                at_budgets(mine, "cplus", (budget,)),
                at_budgets(mine, name, (budget,)),
                kept.metric,
                paper=None if free else "Sec. 4.2; Fig. 3",
            )
            for budget in budgets
            for name in BASELINES
        ),
    ]
    if not free:
        claims += [*_scarcity(everything), *_by_size(family(mine))]
    shares = ", ".join(f"{row.at['model']} {shown(row.figures['recovery'])} %" for row in scales)
    where, does = (", at matched learning of free text,", "loses") if free else ("", "keeps")
    answer = (
        f"With {listed} anchors{where} CPLUS {does} {shown(lead, sign=True)} {kept.points_more} than "
        f"the strongest baseline of each setting, and it leads in {won} of {total} settings; share of SFT's "
        f"forgetting recovered there: {shares or 'not run'}."
    )
    return Summary(rows=(*rows, *scales), answer=answer, claims=tuple(claims))


def gain(results: Sequence[RunResult], metric: Metric) -> Estimate | None:
    """CPLUS minus the strongest baseline of each setting at A in {4, 8}, averaged over the settings.

    A setting is a model, a task and a budget; its strongest baseline is the one with the highest mean over seeds.

    Paper: Sec. 4.2, the mean gain.
    """
    found: dict[Seed, list[float]] = {}
    for model, task, budget in dict.fromkeys(
        (r.spec.model, r.spec.task, r.spec.num_anchors) for r in pick(results, method="cplus", num_anchors=SCARCE)
    ):
        here = pick(results, model=model, task=task)
        rivals = {name: at_budgets(here, name, (budget,)) for name in BASELINES}
        best = strongest(rivals, metric)
        if best is not None:
            for seed, own in differences(at_budgets(here, "cplus", (budget,)), rivals[best], metric).items():
                found.setdefault(seed, []).extend(own)
    return mean_of({seed: statistics.fmean(own) for seed, own in found.items()})


def _scarcity(results: Sequence[RunResult]) -> list[Claim]:
    """Replay and CPL keep more with more anchors, and CPLUS leads with all of them, for the first model and task.

    Paper: Sec. 3.1 names the budgets from four to all 418 past rows; Fig. 1 has CPLUS ahead across budgets.
    """
    here = pick(results, model=results[0].spec.model, task=results[0].spec.task) if results else []
    budgets = sorted({result.spec.num_anchors for result in pick(limited(here), method="cplus")})
    if len(budgets) < 2:
        return []
    few, many = budgets[0], budgets[-1]
    whole = with_all(here)
    steps = {f"A={many}": pick(limited(here), num_anchors=many), "all past rows as anchors": whole}
    return [
        *(
            above(
                f"{name} keeps more with {words} than with A={few}",
                pick(more, method=name),
                pick(limited(here), method=name, num_anchors=few),
                paper="Sec. 3.1; Fig. 1 (a)",
            )
            for words, more in steps.items()
            for name in ("replay", "cpl")
        ),
        *leads("CPLUS keeps more than {} with all past rows as anchors", whole, ("replay", "cpl"), paper="Fig. 1 (a)"),
    ]


def limited(results: Sequence[RunResult]) -> list[RunResult]:
    """The runs with an anchor budget, or without anchors."""
    return pick(results, all_anchors=False)


def with_all(results: Sequence[RunResult]) -> list[RunResult]:
    """The runs with every past row as an anchor."""
    return pick(results, all_anchors=True)


def _by_size(results: Sequence[RunResult]) -> list[Claim]:
    """From each model to the next larger one: the share of forgetting recovered, and Retention with fewest anchors."""
    shares, tasks = _shares(results), tuple(shared(results))
    few = pick(results, task=tasks, num_anchors=min(SCARCE))
    claims = []
    for small, large in pairwise(sorted(shares, key=model_size)):
        words = f"CPLUS recovers a larger share of SFT's forgetting for {large} than for {small}"
        lead = difference(shares[large], shares[small])
        claims.append(Claim(words, lead, paper="Sec. 4.2; Fig. 10"))
        for method in ("cpl", "cplus"):
            own = [pick(few, model=model, method=method) for model in (large, small)]
            kept = [macro([by_seed(pick(runs, task=task), retained) for task in tasks]) for runs in own]
            words = f"{method} keeps more in {large} than in {small}, A={min(SCARCE)}"
            claims.append(Claim(words, difference(*kept), paper="App. E.1; Fig. 9"))
    return claims


def tried(results: Sequence[RunResult]) -> tuple[int, ...]:
    """The scarce budgets that were run."""
    return tuple(budget for budget in SCARCE if pick(results, method="cplus", num_anchors=budget))


def at_budgets(results: Sequence[RunResult], method: str, budgets: tuple[int, ...]) -> list[RunResult]:
    """A method's runs at these budgets; SFT has no budget, so all of its runs."""
    return pick(results, method=method) if method == "sft" else pick(results, method=method, num_anchors=budgets)


def wins(results: Sequence[RunResult]) -> tuple[int, int]:
    """The number of settings in which CPLUS's mean is above every baseline's, and the number of settings."""
    won = total = 0
    kept = retention_measure(results).metric
    for row in table(pick(results, method="cplus"), ("model", "task", "num_anchors"), {"kept": kept}):
        here = pick(results, model=row.at["model"], task=row.at["task"])
        rivals = (over_seeds(at_budgets(here, name, (row.at["num_anchors"],)), kept) for name in BASELINES)
        others = [found.mean for found in rivals if found is not None]
        total += 1
        won += bool(others) and "kept" in row.figures and row.figures["kept"].mean > max(others)
    return won, total


def recovered(results: Sequence[RunResult]) -> tuple[SummaryRow, ...]:
    """By model, smallest first, the share of SFT's forgetting that CPLUS recovers at A in {4, 8}, over shared tasks.

    Paper: App. E.1, Fig. 10: the macro average of the tasks' lines.
    """
    shares = _shares(results)
    return tuple(
        SummaryRow(at={"model": model}, figures={"recovery": estimate(list(shares[model].values()))})
        for model in sorted(shares, key=model_size)
    )


def _shares(results: Sequence[RunResult]) -> dict[str, dict[Seed, float]]:
    """By model and seed, the mean share recovered over the tasks that all models have; only seeds with all of them.

    Paper: App. E.1.    100 (R_CPLUS - R_SFT) / (100 - R_SFT)
    """
    by, found = retention_measure(results), {}
    for model in dict.fromkeys(result.spec.model for result in results):
        tasks = []
        for task in shared(results):
            here = pick(results, model=model, task=task)
            kept = by_seed(at_budgets(here, "cplus", SCARCE), by.metric)
            pairs = paired(kept, by_seed(at_budgets(here, "sft", ()), by.metric))
            tasks.append(
                {seed: recovery(one, sft, by.lossless) for seed, (one, sft) in pairs.items() if sft < by.lossless}
            )
        if own := macro(tasks):
            found[model] = own
    return found


def shared(results: Sequence[RunResult]) -> list[str]:
    """The tasks that every model was adapted to."""
    tasks: dict[str, set[str]] = {}
    for result in results:
        tasks.setdefault(result.spec.model, set()).add(result.spec.task)
    return sorted(set.intersection(*tasks.values())) if tasks else []


def macro(lines: Sequence[Mapping[Seed, float]]) -> dict[Seed, float]:
    """The mean of several lines at their common seeds.

    >>> macro([{0: 1.0, 1: 2.0}, {0: 3.0}])
    {0: 2.0}
    """
    seeds = [seed for seed in lines[0] if all(seed in line for line in lines)] if lines else []
    return {seed: statistics.fmean(line[seed] for line in lines) for seed in seeds}


# E1, limited anchors: Retention by anchor budget (Figs. 1, 3) and by model size (Figs. 9, 10).


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
        series = {method: macro_line(pick(here, method=method), models, [task]) for method in ("cpl", "cplus")}
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
        found = mean_of(macro([by_seed(pick(results, model=model, task=task), retained) for task in tasks]))
        if found is not None:
            points.append((x, found))
    return points


def comparison(found: Collected) -> list[ComparisonLine]:
    """Mean gain, settings led, share of forgetting recovered and Acquisition, with the paper's."""
    runs = limited(found.studies["e01"].runs)
    won, total = wins(runs)
    shares = {row.at["model"]: row.figures["recovery"] for row in recovered(family(runs))}
    paper, paper_shares = STUDY.published[0].numbers, STUDY.published[1].numbers
    return [
        ComparisonLine(
            "CPLUS minus each setting's strongest baseline at A = 4 and 8 (points of Retention)",
            shown(gain(family(runs), retained), sign=True),
            f"+{paper['mean gain at A in {4, 8}, Qwen3']:.2f}",
        ),
        ComparisonLine(
            "settings in which CPLUS keeps most",
            f"{won} of {total}" if total else "not run",
            f"{paper['settings led, Qwen3']} and {paper['settings led, Gemma and Phi']}",
        ),
        ComparisonLine(
            "SFT's forgetting recovered at A = 4 and 8 (%)",
            ", ".join(f"{model} {shown(each)}" for model, each in shares.items()) or "not run",
            ", ".join(f"{model} {value}" for model, value in paper_shares.items()),
        ),
        ComparisonLine(
            "Acquisition of CPLUS (%)",
            shown(over_seeds(pick(runs, method="cplus"), learned)),
            f"{paper['acquisition']:g}",
        ),
    ]


STUDY = Study(
    name="e01",
    title="Limited anchors",
    question="Does CPLUS reduce forgetting when anchors are limited?",
    paper="Sec. 4.2; Figs. 1 (a), 3, 9, 10; App. E.1",
    runs=runs,
    summary=summary,
    published=(
        Published(
            "Sec. 4.2",
            {
                "settings led, Qwen3": "70 of 72",
                "settings led at A in {4, 8}, Qwen3": "24 of 24",
                "settings led, Gemma and Phi": "48 of 48",
                "mean gain at A in {4, 8}, Qwen3": 7.73,
                "acquisition": 100.0,
            },
        ),
        Published(
            "Fig. 10, share of SFT forgetting recovered", {"qwen3-0.6b": 46.6, "qwen3-1.7b": 50.6, "qwen3-4b": 69.4}
        ),
    ),
    figures=(fig_main_results, fig_problem_motivation, fig_model_scale_headline, fig_model_scale),
    comparison=comparison,
)
