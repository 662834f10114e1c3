"""E1: does CPLUS reduce forgetting when anchors are limited?"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

from cplus.evaluation import recovery
from cplus.evaluation.statistics import Estimate, estimate
from cplus.experiment.record import RunResult
from cplus.experiment.settings import RunSpec
from cplus.studies.durations import PARAMETERS
from cplus.studies.scales import BASELINES, MAIN, SCARCE, Scale, family
from cplus.studies.study import Claim, Published, Result, Study, Summary, SummaryRow
from cplus.studies.summaries import (
    Metric,
    Seed,
    above,
    by_seed,
    difference,
    differences,
    free_text,
    over_seeds,
    paired,
    pick,
    retained,
    retention_measure,
    run_results,
    shown,
    strongest,
    table,
)

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
            says=f"CPLUS {kept.better_than} each setting's strongest baseline, mean over A = {listed}",
            margin=lead,
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
    return estimate([statistics.fmean(own) for own in found.values()]) if found else None


def _scarcity(results: Sequence[RunResult]) -> list[Claim]:
    """Replay and CPL keep more with more anchors, and CPLUS leads with all of them, for the first model and task.

    Paper: Sec. 3.1 names the budgets from four to all 418 past rows; Fig. 1 has CPLUS ahead across budgets.
    """
    here = pick(results, model=results[0].spec.model, task=results[0].spec.task) if results else []
    budgets = sorted({result.spec.num_anchors for result in pick(limited(here), method="cplus")})
    if len(budgets) < 2:
        return []
    few, many = budgets[0], budgets[-1]
    steps = {f"A={many}": pick(limited(here), num_anchors=many), "all past rows as anchors": with_all(here)}
    whole = with_all(here)
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
        *(
            above(
                f"CPLUS keeps more than {name} with all past rows as anchors",
                pick(whole, method="cplus"),
                pick(whole, method=name),
                paper="Fig. 1 (a)",
            )
            for name in ("replay", "cpl")
        ),
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
    for small, large in pairwise(sorted(shares, key=lambda model: PARAMETERS.get(model, 0.0))):
        words = f"CPLUS recovers a larger share of SFT's forgetting for {large} than for {small}"
        lead = difference(shares[large], shares[small])
        claims.append(Claim(says=words, margin=lead, paper="Sec. 4.2; Fig. 10"))
        for method in ("cpl", "cplus"):
            kept = [_macro_kept(pick(few, model=model, method=method), tasks) for model in (large, small)]
            words = f"{method} keeps more in {large} than in {small}, A={min(SCARCE)}"
            claims.append(Claim(says=words, margin=difference(*kept), paper="App. E.1; Fig. 9"))
    return claims


def _macro_kept(results: Sequence[RunResult], tasks: Sequence[str]) -> dict[Seed, float]:
    return macro([by_seed(pick(results, task=task), retained) for task in tasks])


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
        SummaryRow(at={"model": model}, figures={"recovery": estimate(list(own.values()))})
        for model, own in sorted(shares.items(), key=lambda pair: PARAMETERS.get(pair[0], 0.0))
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


STUDY = Study(
    name="e01",
    title="Limited anchors",
    question="Does CPLUS reduce forgetting when anchors are limited?",
    paper="Sec. 4.2; Figs. 1 (a), 3, 9, 10; App. E.1",
    runs=runs,
    summary=summary,
    published=(
        Published(
            where="Sec. 4.2",
            numbers={
                "settings led, Qwen3": "70 of 72",
                "settings led at A in {4, 8}, Qwen3": "24 of 24",
                "settings led, Gemma and Phi": "48 of 48",
                "mean gain at A in {4, 8}, Qwen3": 7.73,
                "acquisition": 100.0,
            },
        ),
        Published(
            where="Fig. 10, share of SFT forgetting recovered",
            numbers={"qwen3-0.6b": 46.6, "qwen3-1.7b": 50.6, "qwen3-4b": 69.4},
        ),
    ),
)
