"""E1: does CPLUS reduce forgetting when anchors are limited?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.evaluate import recovery
from cplus.evaluate.statistics import estimate
from cplus.records import RunResult, RunSpec
from cplus.studies.scales import BASELINES, MAIN, SCARCE, Scale
from cplus.studies.shape import (
    above,
    by_seed,
    free_text,
    keeping,
    margin,
    over_seeds,
    pick,
    shown,
    single,
    strongest,
    table,
)
from cplus.studies.study import Published, Result, Row, Study, Summary


def runs(scale: Scale) -> list[RunSpec]:
    """Every method at every place and budget; SFT once a place and seed."""
    return [
        scale.at(model=place.model, task=place.task, lr=place.lr, method=method, num_anchors=budget, seed=seed)
        for place in scale.places
        for budget in place.budgets
        for method in MAIN
        for seed in range(scale.five)
    ]


def summary(results: Sequence[Result]) -> Summary:
    """Retention by place, budget and method; CPLUS against each baseline where anchors are scarce; model scale.

    Of free text the same by the rise of the past answers' loss at matched learning.
    """
    mine = single(results)
    kept, free = keeping(mine), free_text(mine)
    budgets = tried(mine) if free else SCARCE
    rows = table(mine, ("model", "task", "method", "num_anchors"), kept.figures)
    scarce = {method: at_budgets(mine, method, SCARCE) for method in MAIN}
    claims = tuple(
        above(
            f"CPLUS {kept.better} {name}, A={budget}",
            at_budgets(mine, "cplus", (budget,)),
            at_budgets(mine, name, (budget,)),
            kept.figure,
        )
        for budget in budgets
        for name in BASELINES
    )
    best = strongest({name: scarce[name] for name in BASELINES}, kept.figure)
    gain = None if best is None else margin(scarce["cplus"], scarce[best], kept.figure)
    (won, total), scales = wins(mine), recovered(mine)
    shares = ", ".join(f"{row.at['model']} {shown(row.figures['recovery'])} %" for row in scales)
    where, does = (", at matched learning of free text,", "loses") if free else ("", "keeps")
    answer = (
        f"With {' and '.join(map(str, budgets))} anchors{where} CPLUS {does} {shown(gain, sign=True)} {kept.more} than "
        f"the strongest baseline ({best}), and it leads in {won} of {total} settings; share of SFT's forgetting "
        f"recovered there: {shares or 'not run'}."
    )
    return Summary(rows=(*rows, *scales), answer=answer, claims=claims)


def tried(results: Sequence[RunResult]) -> tuple[int, ...]:
    """The scarce budgets that were run."""
    return tuple(budget for budget in SCARCE if pick(results, method="cplus", num_anchors=budget))


def at_budgets(results: Sequence[RunResult], method: str, budgets: tuple[int, ...]) -> list[RunResult]:
    """A method's runs at these budgets; SFT has none."""
    return pick(results, method=method) if method == "sft" else pick(results, method=method, num_anchors=budgets)


def wins(results: Sequence[RunResult]) -> tuple[int, int]:
    """In how many places and budgets CPLUS's mean is above every baseline's, and of how many."""
    won = total = 0
    kept = keeping(results).figure
    for row in table(pick(results, method="cplus"), ("model", "task", "num_anchors"), {"kept": kept}):
        here = pick(results, model=row.at["model"], task=row.at["task"])
        rivals = (over_seeds(at_budgets(here, name, (row.at["num_anchors"],)), kept) for name in BASELINES)
        others = [found.mean for found in rivals if found is not None]
        total += 1
        won += bool(others) and "kept" in row.figures and row.figures["kept"].mean > max(others)
    return won, total


def recovered(results: Sequence[RunResult]) -> tuple[Row, ...]:
    """By model, the share of SFT's forgetting that CPLUS recovers at A in {4, 8}, over the tasks the models share.

    Paper: App. E.1.    100 (R_CPLUS - R_SFT) / (100 - R_SFT)
    """
    models = list(dict.fromkeys(result.spec.model for result in results))
    by = keeping(results)
    shared = set.intersection(*({r.spec.task for r in pick(results, model=m)} for m in models)) if models else set()
    rows = []
    for model in models:
        here = pick(results, model=model, task=tuple(shared))
        kept, plain = (
            by_seed(at_budgets(here, "cplus", SCARCE), by.figure),
            by_seed(at_budgets(here, "sft", ()), by.figure),
        )
        values = [recovery(kept[seed], plain[seed], by.whole) for seed in kept if plain.get(seed, by.whole) < by.whole]
        if values:
            rows.append(Row(at={"model": model}, figures={"recovery": estimate(values)}))
    return tuple(rows)


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
                "mean gain at A in {4, 8}": 7.73,
                "acquisition": 100.0,
            },
        ),
        Published(
            where="Fig. 10, share of SFT forgetting recovered",
            numbers={"qwen3-0.6b": 46.6, "qwen3-1.7b": 50.6, "qwen3-4b": 69.4},
        ),
    ),
)
