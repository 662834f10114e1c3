"""E1: does CPLUS reduce forgetting when anchors are limited?"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from cplus.evaluation.changes import recovery
from cplus.evaluation.statistics import Estimate, estimate
from cplus.lab import drawing, summaries
from cplus.lab.drawing import line, lines
from cplus.lab.e02 import draw_outside_changes
from cplus.lab.records import RunResult
from cplus.lab.scales import BASELINES, MAIN, SCARCE, Scale, family, same_family
from cplus.lab.study import Claim, Collected, ComparisonLine, Picture, Published, Summary, SummaryRow
from cplus.lab.summaries import KEPT_AND_LEARNED, Seed, above, by_seed, leads, over_seeds, pick, retained, shown
from cplus.training.settings import RunSpec

TITLE = "Limited anchors"
QUESTION = "Does CPLUS reduce forgetting when anchors are limited?"
PAPER = "Sec. 4.2; Figs. 1 (a), 3, 9, 10; App. E.1"
SEC_4_2 = Published(
    "Sec. 4.2",
    {
        "settings led, Qwen3": "70 of 72",
        "settings led at A in {4, 8}, Qwen3": "24 of 24",
        "settings led, Gemma and Phi": "48 of 48",
        "mean gain at A in {4, 8}, Qwen3": 7.73,
        "acquisition": 100.0,
    },
)
FIG_10 = Published(
    "Fig. 10, share of SFT forgetting recovered", {"qwen3-0.6b": 46.6, "qwen3-1.7b": 50.6, "qwen3-4b": 69.4}
)

ALL_ANCHORS = ("replay", "cpl", "cplus")
"""The methods of Fig. 1 (a), also run with every past row as an anchor."""


def runs(scale: Scale) -> list[RunSpec]:
    """Every method at every model, task, budget and seed; SFT has no budget, and one run if the seed has no effect.

    For the first model and task also with every past row as an anchor.
    """
    seeds = range(scale.seeds_where_five)
    found = [
        spec
        for cell in scale.grid
        for spec in scale.each({"num_anchors": cell.budgets, "method": MAIN, "seed": seeds}, **cell.place)
    ]
    axes = {"method": ALL_ANCHORS, "seed": seeds}
    return found + scale.each(axes, **scale.grid[0].place, num_anchors=0, all_anchors=True, external=())


def summary(results: Sequence[RunResult]) -> Summary:
    """Retention by model, task, budget and method; CPLUS against each baseline at scarce anchors; model scale."""
    mine = pick(results, all_anchors=False)
    listed = " and ".join(map(str, SCARCE))
    rows = (
        *summaries.table(mine, ("model", "task", "method", "num_anchors"), KEPT_AND_LEARNED),
        *summaries.table(pick(results, all_anchors=True), ("model", "task", "method", "all_anchors"), KEPT_AND_LEARNED),
    )
    lead, (won, total), scales = gain(family(mine)), wins(mine), recovered(family(mine))
    strongest = f"CPLUS keeps more than each setting's strongest baseline, mean over A = {listed}"
    claims = [Claim(strongest, lead, "Sec. 4.2")]
    for budget in SCARCE:
        few = pick(mine, num_anchors=(0, budget))  # SFT has no budget
        claims += leads(f"CPLUS keeps more than {{}}, A={budget}", few, BASELINES, paper="Sec. 4.2; Fig. 3")
    claims += [*_scarcity(results), *_by_size(family(mine))]
    shares = ", ".join(f"{row.at['model']} {shown(row.figures['recovery'])} %" for row in scales)
    answer = (
        f"With {listed} anchors CPLUS keeps {shown(lead, sign=True)} points more than "
        f"the strongest baseline of each setting, and it leads in {won} of {total} settings; share of SFT's "
        f"forgetting recovered there: {shares or 'not run'}."
    )
    return Summary(rows=(*rows, *scales), answer=answer, claims=tuple(claims))


def gain(results: Sequence[RunResult]) -> Estimate | None:
    """CPLUS minus the strongest baseline of each setting at A in {4, 8}, averaged over the settings.

    Paper: Sec. 4.2, the mean gain.
    """
    found: list[tuple[Seed, float]] = []
    for own in _settings(pick(results, num_anchors=(0, *SCARCE))):
        ours = own.pop("cplus")
        if (best := summaries.strongest(own)) is not None:
            pairs = summaries.differences(ours, own[best])
            found += [(seed, lead) for seed, leads in pairs.items() for lead in leads]
    seeds = summaries.grouped(found, lambda pair: pair[0])
    return summaries.mean_of({seed: statistics.fmean(lead for _, lead in own) for seed, own in seeds.items()})


def _settings(results: Sequence[RunResult]) -> list[dict[str, list[RunResult]]]:
    """The runs of each method by setting: a model, a task and a budget of CPLUS. SFT has no budget."""
    places = dict.fromkeys((r.spec.model, r.spec.task, r.spec.num_anchors) for r in pick(results, method="cplus"))
    found = []
    for model, task, budget in places:
        here, budgets = pick(results, model=model, task=task), dict.fromkeys(MAIN, budget) | {"sft": 0}
        found.append({method: pick(here, method=method, num_anchors=few) for method, few in budgets.items()})
    return found


def wins(results: Sequence[RunResult]) -> tuple[int, int]:
    """The number of settings in which CPLUS's mean is above every baseline's, and the number of settings."""
    found = _settings(results)
    rivalled = [own for own in found if any(own[name] for name in BASELINES)]
    return [summaries.strongest(own) for own in rivalled].count("cplus"), len(found)


def _scarcity(results: Sequence[RunResult]) -> list[Claim]:
    """Replay and CPL keep more with more anchors, and CPLUS leads with all of them, for the first model and task.

    Paper: Sec. 3.1 names the budgets from four to all 418 past rows; Fig. 1 has CPLUS ahead across budgets.
    """
    here = pick(results, model=results[0].spec.model, task=results[0].spec.task) if results else []
    limited, whole = (pick(here, all_anchors=every) for every in (False, True))
    budgets = sorted({result.spec.num_anchors for result in pick(limited, method="cplus")})
    if len(budgets) < 2:
        return []
    few, many = budgets[0], budgets[-1]
    claims, both = [], ("replay", "cpl")
    for words, more in {f"A={many}": pick(limited, num_anchors=many), "all past rows as anchors": whole}.items():
        for name in both:
            says = f"{name} keeps more with {words} than with A={few}"
            least = pick(limited, method=name, num_anchors=few)
            claims.append(above(says, pick(more, method=name), least, paper="Sec. 3.1; Fig. 1 (a)"))
    return claims + leads("CPLUS keeps more than {} with all past rows as anchors", whole, both, paper="Fig. 1 (a)")


def _by_size(results: Sequence[RunResult]) -> list[Claim]:
    """From each model to the next larger one: the share of forgetting recovered, and Retention with fewest anchors."""
    shares, tasks = _shares(results), tuple(shared(results))
    few = pick(results, task=tasks, num_anchors=min(SCARCE))
    claims = []
    for small, large in pairwise(shares):
        words = f"CPLUS recovers a larger share of SFT's forgetting for {large} than for {small}"
        lead = summaries.difference(shares[large], shares[small])
        claims.append(Claim(words, lead, paper="Sec. 4.2; Fig. 10"))
        for method in ("cpl", "cplus"):
            own = [pick(few, model=model, method=method) for model in (large, small)]
            kept = [macro([by_seed(pick(runs, task=task), retained) for task in tasks]) for runs in own]
            words = f"{method} keeps more in {large} than in {small}, A={min(SCARCE)}"
            claims.append(Claim(words, summaries.difference(*kept), paper="App. E.1; Fig. 9"))
    return claims


def recovered(results: Sequence[RunResult]) -> tuple[SummaryRow, ...]:
    """By model, smallest first, the share of SFT's forgetting that CPLUS recovers at A in {4, 8}, over shared tasks.

    Paper: App. E.1, Fig. 10: the macro average of the tasks' lines.
    """
    return tuple(
        SummaryRow(at={"model": model}, figures={"recovery": estimate(list(own.values()))})
        for model, own in _shares(results).items()
    )


def _shares(results: Sequence[RunResult]) -> dict[str, dict[Seed, float]]:
    """By model, smallest first, and seed, the mean share recovered over the tasks that all models have.

    Only seeds with all of them count.

    Paper: App. E.1.    100 (R_CPLUS - R_SFT) / (100 - R_SFT)
    """
    found = {}
    for model in sorted(dict.fromkeys(result.spec.model for result in results), key=drawing.model_size):
        tasks = []
        for task in shared(results):
            here = pick(results, model=model, task=task)
            kept = by_seed(pick(here, method="cplus", num_anchors=SCARCE), retained)
            pairs = summaries.paired(kept, by_seed(pick(here, method="sft"), retained))
            tasks.append({seed: recovery(one, sft) for seed, (one, sft) in pairs.items() if sft < 100.0})
        if own := macro(tasks):
            found[model] = own
    return found


def shared(results: Sequence[RunResult]) -> list[str]:
    """The tasks that every model was adapted to."""
    models = summaries.grouped(results, lambda result: result.spec.model).values()
    return sorted(set.intersection(*({result.spec.task for result in own} for own in models))) if models else []


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
    places = list(dict.fromkeys((spec.model, spec.task) for spec in own.specs)) or [("", "")]
    columns = 4 if len(places) % 4 == 0 else min(3, len(places))
    figure, axes = drawing.panels(len(places), columns, width=3.0, height=2.3, share="row", ylabel="Retention (%)")
    for axis, (model, task) in zip(axes, places, strict=True):
        budgets = {s.num_anchors for s in own.specs if (s.model, s.task) == (model, task) and s.num_anchors}
        _curves(axis, pick(own.results, model=model, task=task, all_anchors=False), budgets, MAIN[1:])
        axis.set_title(f"{model} · {task}" if model else "")
    caption = (
        "Retention across anchor budgets, one panel a model and task; panels of a row share the vertical scale. SFT "
        "uses no anchors and is a level line."
    )
    return drawing.picture(figure, "fig:main-results", "Fig. 3", caption, "Error bars are standard errors")


def fig_problem_motivation(found: Collected) -> Picture:
    """Retention by budget, and the change on tasks that are neither trained on nor anchors.

    Paper: Fig. 1.
    """
    first = found.scale.grid[0]
    figure, (left, right) = drawing.panels(2, width=4.2, height=3.0)
    here = pick(found.studies["e01"].results, model=first.model, task=first.task)
    _curves(left, pick(here, all_anchors=False), first.budgets, ALL_ANCHORS)
    if whole := pick(here, all_anchors=True):  # at the number of past rows; the lines lead there
        x = round(statistics.fmean(result.counts["anchors"] for result in whole))
        for method in ALL_ANCHORS:
            kept = over_seeds(pick(whole, method=method), retained)
            style = drawing.colour_and_marker(method)
            name = drawing.method_name(method)
            line(left, [(x, kept)] if kept else [], name, *style, linestyle="none", markerfacecolor="none")
        left.set_xticks([*first.budgets, x], [*map(str, first.budgets), f"all\n({x})"])
    left.set(ylabel="Retention (%)", title=f"(a) {first.model} adapted to {first.task}")
    draw_outside_changes(right, pick(found.studies["e02"].results, task=first.task))
    right.set_title(f"(b) other tasks after {first.task}")
    caption = (
        "(a) Retention by the number of anchors, at the right with every past row; SFT uses none. (b) Change of "
        "accuracy on tasks used neither for training nor as anchors; diamonds are their average."
    )
    return drawing.picture(figure, "fig:problem-motivation", "Fig. 1", caption)


def _curves(axis: Any, here: Sequence[RunResult], budgets: Iterable[int], methods: Sequence[str]) -> None:
    """Every method's line and SFT's level."""
    drawing.level_line(axis, over_seeds(pick(here, method="sft"), retained), "sft")
    lines(axis, {method: drawing.by_budget(here, method) for method in methods})
    drawing.budget_axis(axis, budgets)


def fig_model_scale_headline(found: Collected) -> Picture:
    """CPL and CPLUS with four anchors, by model.

    Paper: Fig. 9.
    """
    models, tasks = _models_and_shared_tasks(found)
    figure, axes = drawing.panels(len(tasks), width=3.6, height=2.8)
    for axis, task in zip(axes, tasks, strict=True):
        here = pick(found.studies["e01"].results, task=task, num_anchors=min(SCARCE))
        series = {method: macro_line(pick(here, method=method), models, [task]) for method in ("cpl", "cplus")}
        lines(axis, series)
        for x, best in series["cplus"]:
            own = pick(here, model=models[int(x)])
            lead = summaries.margin(pick(own, method="cplus"), pick(own, method="cpl"))
            axis.annotate(shown(lead, sign=True), (x, best.mean), (0, 9), textcoords="offset points", ha="center")
        _model_axis(axis, models)
        axis.margins(x=0.15, y=0.2)
        axis.set(title=task, ylabel="Retention (%)")
    caption = (
        f"Retention with {min(SCARCE)} anchors by model, smallest first; labels are CPLUS minus CPL in points, paired "
        "over seeds."
    )
    return drawing.picture(figure, "fig:model-scale-headline", "Fig. 9", caption)


def _models_and_shared_tasks(found: Collected) -> tuple[list[str], list[str]]:
    """The models of the first one's family by size, and the tasks that all of them are adapted to."""
    grid = found.scale.grid
    models = sorted(dict.fromkeys(c.model for c in grid if same_family(c.model, grid[0].model)), key=drawing.model_size)
    run = {(cell.model, cell.task) for cell in grid}
    tasks = dict.fromkeys(cell.task for cell in grid)
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
    results = pick(found.studies["e01"].results, model=tuple(models))
    figure, axes = drawing.panels(3, width=3.0, height=2.6)
    groups = {cell.task: [cell.task] for cell in found.scale.grid}
    colours = dict(zip(groups, drawing.PALETTE, strict=False)) | {"macro average": drawing.INK}
    for name, tasks in (groups | ({"macro average": shared} if len(shared) > 1 else {})).items():
        here = pick(results, task=tuple(tasks))
        shares = {row.at["model"]: row.figures["recovery"] for row in recovered(here)}
        each = (
            macro_line(pick(here, method="sft"), models, tasks),
            macro_line(pick(here, method="cplus", num_anchors=SCARCE), models, tasks),
            [(float(x), shares[model]) for x, model in enumerate(models) if model in shares],
        )
        for axis, points in zip(axes, each, strict=True):
            line(axis, points, name, colours[name], "o")
    titles = ("SFT: Retention (%)", "CPLUS, A = 4 and 8: Retention (%)", "SFT's forgetting recovered (%)")
    for axis, title in zip(axes, titles, strict=True):
        _model_axis(axis, models)
        axis.set_title(title)
    caption = (
        "By model, smallest first: what SFT keeps, what CPLUS keeps with 4 and 8 anchors, and 100 (CPLUS - SFT) / "
        "(100 - SFT). The black line is the macro average of the tasks' lines, where all models share several tasks."
    )
    return drawing.picture(figure, "fig:model-scale", "Fig. 10", caption)


def macro_line(results: Sequence[RunResult], models: Sequence[str], tasks: Sequence[str]) -> drawing.Points:
    """By model, the mean of the tasks' Retention, over the seeds that have every task."""
    kept = [macro([by_seed(pick(results, model=model, task=task), retained) for task in tasks]) for model in models]
    return [(x, found) for x, own in enumerate(kept) if (found := summaries.mean_of(own)) is not None]


def comparison(found: Collected) -> list[ComparisonLine]:
    """Mean gain, settings led, share of forgetting recovered and Acquisition, with the paper's."""
    runs = pick(found.studies["e01"].results, all_anchors=False)
    won, total = wins(runs)
    shares = {row.at["model"]: row.figures["recovery"] for row in recovered(family(runs))}
    paper = SEC_4_2.numbers
    led = f"{paper['settings led, Qwen3']} and {paper['settings led, Gemma and Phi']}"
    recovered_here = ", ".join(f"{model} {shown(each)}" for model, each in shares.items()) or "not run"
    recovered_there = ", ".join(f"{model} {value}" for model, value in FIG_10.numbers.items())
    learned = shown(over_seeds(pick(runs, method="cplus"), summaries.learned))
    lead = "CPLUS minus each setting's strongest baseline at A = 4 and 8 (points of Retention)"
    published = f"+{paper['mean gain at A in {4, 8}, Qwen3']:.2f}"
    return [
        ComparisonLine(lead, shown(gain(family(runs)), sign=True), published),
        ComparisonLine("settings in which CPLUS keeps most", f"{won} of {total}" if total else "not run", led),
        ComparisonLine("SFT's forgetting recovered at A = 4 and 8 (%)", recovered_here, recovered_there),
        ComparisonLine("Acquisition of CPLUS (%)", learned, f"{paper['acquisition']:g}"),
    ]
