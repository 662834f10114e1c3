"""The frontier: what does a method keep beyond plain fine-tuning at its best rate, with the same number of updates?

Every method picks the rung of its ladder that keeps most within a budget: the updates that SFT needs at a fifth of the
scale's rate, with a warm-up. A seed of its own picks; the others report."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cplus.evaluation.statistics import Estimate, estimate
from cplus.lab import summaries
from cplus.lab.drawing import SOFT, cell, colour_and_marker, line, method_name, panels, picture
from cplus.lab.records import RunResult
from cplus.lab.scales import Scale
from cplus.lab.study import ADDED_HERE, Claim, Collected, ComparisonLine, Picture, Summary, SummaryRow, Table
from cplus.lab.summaries import by_seed, difference, flops, mean_of, over_seeds, pick, retained, row, shown, updates
from cplus.training.settings import RunSpec

TITLE = "The frontier"
QUESTION = "What does each method keep beyond plain fine-tuning at its best rate, at equal cost?"

RUNGS = 5
"""Rates of a ladder, each half of the one before."""
TOP = {
    **dict.fromkeys(("lora", "osf", "mofo", "stm"), 6.4),
    **dict.fromkeys(("talr", "flow", "eaft", "asft", "cplus-curvature"), 3.2),
}
"""The highest rate as a multiple of the scale's, where it is not 1.6: methods that move fewer weights, or less."""
CONSTANT = 3
LADDER = RUNGS + CONSTANT
"""The number of its lower rates that are also tried without a warm-up; at the higher ones e13 has the answer."""
WARMUP = 0.15
SLOWEST = 0.05
"""SFT's last rate on the seeds that report, below its ladder: several methods cost more FLOPs than the ladder's end."""
EPOCHS = 40
LEARNED = 99.0
BEYOND = (2, 5)
"""Epochs that a method which works on the finished model trains after everything is learned: it needs room to undo."""
BUDGET_RATE = 0.2
"""SFT at this multiple of the scale's rate, with a warm-up, sets the budget of updates."""
TUNING_SEEDS = (100,)
"""It chooses each method's rate and schedule, and nothing is reported of it."""
FIRST_SEED = 5
"""The first of the seeds that report; those below were seen while the rules of this study were made."""
ABLE = ("wise-ft", "sft-repair", "cplus-repair")
OURS = ("cpl", "cplus", "cplus-curvature", "sft-repair", "cplus-repair")
RECIPE = "cplus-repair"
"""What the claims are about: the row that keeps most within the budget on the tuning seed."""
LADDERS = ("sft", "sft-repair")
"""The rows whose whole ladder is reported."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A rung of a method's ladder: its rate as a multiple of the scale's, whether it begins with a warm-up, and the
    epochs after everything is learned.
    """

    rate: float
    warm: bool
    beyond: int = 0


DEMO_SEEDS = range(10, 15)
"""The seeds of the demo's training; a fault of the repair was found on those before."""
BROUGHT_BACK = {"sft-repair": 90.0, "cplus-repair": 95.0}
"""What a repair is to keep, in percent, after the demo's training: twelve epochs at a rate that does most damage."""
CHOSEN: Mapping[str, Choice] = {
    "sft": Choice(rate=0.2, warm=False),
    "replay": Choice(rate=0.2, warm=False),
    "probe-replay": Choice(rate=0.2, warm=False),
    "anchor-probe-replay": Choice(rate=0.2, warm=False),
    "distillation": Choice(rate=0.2, warm=True),
    "probe-distillation": Choice(rate=0.2, warm=False),
    "kl-base": Choice(rate=0.2, warm=False),
    "eaft": Choice(rate=0.2, warm=False),
    "talr": Choice(rate=3.2, warm=True),
    "stm": Choice(rate=0.4, warm=False),
    "flow": Choice(rate=0.4, warm=False),
    "ewc": Choice(rate=0.2, warm=True),
    "lora": Choice(rate=0.8, warm=True),
    "osf": Choice(rate=0.8, warm=True),
    "freeze-layers": Choice(rate=0.4, warm=False),
    "ssu": Choice(rate=0.4, warm=False),
    "mofo": Choice(rate=0.4, warm=False),
    "cautious": Choice(rate=0.2, warm=False),
    "wise-ft": Choice(rate=0.2, warm=False, beyond=2),
    "cpl": Choice(rate=0.4, warm=True),
    "cplus": Choice(rate=0.4, warm=False),
    "cplus-curvature": Choice(rate=0.4, warm=False),
    "sft-repair": Choice(rate=0.2, warm=False, beyond=2),
    "cplus-repair": Choice(rate=0.4, warm=False, beyond=2),
}
"""What the tuning seed chose at the scale `desk`; a test compares it with the committed results."""


METHODS = (*CHOSEN, "asft")
"""Every method of the study; asft learned at no rate."""
NEIGHBOURS = tuple(method for method in METHODS if method not in OURS)


def ladder(method: str) -> list[Choice]:
    """Five rates with a warm-up, each half of the one before; the lower three of them also without one."""
    top = TOP.get(method, 1.6)
    rates = [(top / 2**k, True) for k in range(RUNGS)] + [(top / 2**k, False) for k in range(RUNGS - CONSTANT, RUNGS)]
    later = BEYOND if method in ABLE else (0,)
    return [Choice(rate=rate, warm=warm, beyond=beyond) for beyond in later for rate, warm in rates]


def run_of(scale: Scale, method: str, choice: Choice, seed: int) -> RunSpec:
    """One run: until the new rows are learned, and a little longer where something is undone afterwards."""
    return scale.at(
        method=method,
        lr=scale.base.lr * choice.rate,
        warmup=WARMUP if choice.warm else 0.0,
        epochs=EPOCHS if scale.name != "smoke" else scale.base.epochs,
        stop_at=LEARNED,
        beyond=choice.beyond,
        external=(),
        seed=seed,
    )


def runs(scale: Scale) -> list[RunSpec]:
    """Every method's ladder on the tuning seed; on others its chosen rung, and the ladders of SFT and its repair."""
    if scale.name == "smoke":
        tried = [run_of(scale, method, ladder(method)[0], 0) for method in METHODS]
        return [*tried, *(demo_run(scale, method, 0) for method in BROUGHT_BACK)]
    seeds = range(FIRST_SEED, FIRST_SEED + scale.seeds_where_five)
    return [
        *(run_of(scale, m, rung, seed) for m in METHODS for rung in ladder(m) for seed in TUNING_SEEDS),
        *(run_of(scale, m, rung, seed) for m in LADDERS for rung in ladder(m)[:LADDER] for seed in seeds),
        *(run_of(scale, "sft", Choice(rate=SLOWEST, warm=warm), seed) for warm in (True, False) for seed in seeds),
        *(run_of(scale, m, rung, seed) for m, rung in CHOSEN.items() for seed in seeds),
        *(demo_run(scale, m, seed) for m in ("sft", "cplus", *BROUGHT_BACK) for seed in DEMO_SEEDS),
    ]


def demo_run(scale: Scale, method: str, seed: int) -> RunSpec:
    """A run with the demo's rate and epochs."""
    return scale.at(method=method, external=(), seed=seed)


def as_in_the_demo(result: RunResult) -> bool:
    """Whether a run has the demo's rate and epochs; it is not on any ladder."""
    return result.spec.stop_at is None


Line: TypeAlias = Sequence[tuple[float, float]]
"""Costs and the best Retention that plain fine-tuning reaches with at most that cost, cheapest first."""
Cost: TypeAlias = Callable[[RunResult], float]
COSTS: Mapping[str, Cost] = {"updates": updates, "FLOPs": flops, "seconds": lambda result: result.seconds}


def required(plain: Iterable[RunResult]) -> float:
    """The Acquisition that a run must reach to count; none where SFT itself never learned, as at the scale `smoke`."""
    return LEARNED if any(result.acquisition >= LEARNED for result in plain) else 0.0


def frontier(results: Iterable[RunResult], cost: Cost = updates, least: float = LEARNED) -> Line:
    """The line of the runs that learned everything: Retention never falls as the cost rises."""
    best: dict[float, float] = {}
    for spent, kept in sorted((cost(r), r.retention) for r in results if r.acquisition >= least):
        best[spent] = max([kept, *best.values()])
    return list(best.items())


def height(line: Line, spent: float) -> float:
    """The line at a cost, interpolated over its logarithm; beyond its ends, the first or last point's height.

    Beyond the last point a distance from it is at most what is returned: SFT may keep more at that cost.

    >>> height([(10.0, 80.0), (40.0, 90.0)], 20.0)
    85.0
    """
    if spent <= line[0][0]:
        return line[0][1]
    for (low, kept), (high, more) in itertools.pairwise(line):
        if low <= spent <= high:
            return kept if high == low else kept + (more - kept) * math.log(spent / low) / math.log(high / low)
    return line[-1][1]


def distances(results: Iterable[RunResult], plain: Sequence[RunResult], cost: Cost = updates) -> dict[int, float]:
    """Each run's Retention less that of SFT's line of the same seed at the same cost; runs that did not learn: none."""
    least = required(plain)
    lines = {seed: frontier(pick(plain, seed=seed), cost, least) for seed in {result.spec.seed for result in plain}}
    return {
        r.spec.seed: r.retention - height(lines[r.spec.seed], cost(r))
        for r in results
        if r.acquisition >= least and lines.get(r.spec.seed)
    }


def rung_of(result: RunResult, base_lr: float) -> Choice:
    """The rung of a run's ladder."""
    rate = round(result.spec.lr / base_lr, 6)
    return Choice(rate=rate, warm=bool(result.spec.warmup), beyond=result.spec.beyond)


def budget(plain: Iterable[RunResult], base_lr: float) -> dict[int, float]:
    """The updates of SFT at the budget's rate, by seed."""
    rung = Choice(rate=BUDGET_RATE, warm=True)
    return {r.spec.seed: updates(r) for r in plain if r.spec.method == "sft" and rung_of(r, base_lr) == rung}


def chosen(results: Sequence[RunResult], base_lr: float) -> dict[str, Choice]:
    """Each method's rung that learns everything and keeps most within the budget on the tuning seed.

    A method that needs more than the budget at every rung has the rung with the fewest updates.
    """
    tuning = [result for result in pick(results, seed=TUNING_SEEDS) if result.acquisition >= LEARNED]
    limit = max(budget(tuning, base_lr).values())
    found: dict[str, Choice] = {}
    for method in dict.fromkeys(result.spec.method for result in tuning):
        own = pick(tuning, method=method)
        within = [result for result in own if updates(result) <= limit]
        best = max(within, key=lambda r: r.retention) if within else min(own, key=updates)
        found[method] = rung_of(best, base_lr)
    return found


def reported(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """The chosen rung of each method on the seeds that chose nothing; every run where a scale has not that rung."""
    mine = [result for result in results if result.spec.seed not in TUNING_SEEDS]
    own = summaries.grouped(mine, lambda result: result.spec.method)
    return {
        method: [run for run in runs if rung_of(run, _lr(mine)) == CHOSEN.get(method)] or runs
        for method, runs in own.items()
    }


def _lr(results: Sequence[RunResult]) -> float:
    """The scale's rate: SFT's ladder begins at 1.6 of it."""
    return max(result.spec.lr for result in pick(results, method="sft")) / 1.6


def summary(whole: Sequence[RunResult]) -> Summary:
    """Each method at its own best rate: updates, Retention and distance from SFT's line by three costs."""
    mine = _others(whole)
    plain, table = pick(mine, method="sft"), reported(mine)
    ours = by_seed(table.get(RECIPE, []), retained)
    ahead = mean_of(distances(table.get(RECIPE, []), plain))
    broken = {m: by_seed(filter(as_in_the_demo, pick(whole, method=m)), retained) for m in BROUGHT_BACK}
    claims = [
        Claim(f"{RECIPE} lies above SFT's line at equal updates", ahead),
        *(
            Claim(f"{RECIPE} keeps more than {method}", difference(ours, by_seed(own, retained)))
            for method, own in table.items()
            if method in NEIGHBOURS
        ),
        *(
            Claim(
                f"{method} keeps at least {least:.0f} % after the demo's training",
                mean_of({seed: kept - least for seed, kept in broken[method].items()}),
            )
            for method, least in BROUGHT_BACK.items()
        ),
    ]
    steps = over_seeds(table.get(RECIPE, []), updates)
    answer = (
        f"Within the budget and at its own best rate, {RECIPE} keeps {shown(mean_of(ours))} % with {shown(steps)} "
        f"updates: {shown(ahead, sign=True)} points above the line of plain fine-tuning at equal updates. "
        f"After the demo's training a repair of SFT keeps {shown(mean_of(broken['sft-repair']))} %, one of CPLUS "
        f"{shown(mean_of(broken['cplus-repair']))} %."
    )
    rows = tuple(_row(method, own, plain) for method, own in table.items())
    return Summary(rows=rows, answer=answer, claims=tuple(claims))


def _row(method: str, own: Sequence[RunResult], plain: Sequence[RunResult]) -> SummaryRow:
    first = own[0].spec
    at = {"method": method, "lr": first.lr, "warmup": bool(first.warmup), "beyond": first.beyond}
    above = {f"above SFT at equal {name}": mean_of(distances(own, plain, cost)) for name, cost in COSTS.items()}
    known = {name: value for name, value in above.items() if value is not None}
    return SummaryRow(at=at, figures={**row(at, own, {**summaries.KEPT_AND_LEARNED, **COSTS}).figures, **known})


# The frontier: Retention against updates, every method at its own best rate; not in the paper.


NAMED = {"replay": (-32, -3), "freeze-layers": (7, -7), "lora": (6, -4), "osf": (7, -12), "wise-ft": (3, -12)}
"""Neighbours with a name of their own in the figure, and where it is written; the others are dots."""
LOWEST = 75.0
"""Methods that keep less are in the table alone."""
PLACES = {"cplus": (-32, 2), "cplus-curvature": (7, -2), "cplus-repair": (7, 3), "sft-repair": (-52, 3)}


def _others(runs: Sequence[RunResult]) -> list[RunResult]:
    """The runs on ladders, but for those of the tuning seed."""
    return [run for run in runs if run.spec.seed not in TUNING_SEEDS and not as_in_the_demo(run)]


def fig_frontier(found: Collected) -> Picture:
    """SFT's line over its ladder of rates, and each other method's chosen point."""
    runs = _others(found.studies["frontier"].results)
    figure, [axis] = panels(1, width=6.4, height=3.6)
    table = reported(runs)
    rungs = summaries.grouped(pick(runs, method="sft"), lambda run: (run.spec.lr, run.spec.warmup)).values()
    points = [point for own in rungs if (point := _point(own))]
    if points:
        style = colour_and_marker("sft")
        line(axis, sorted(points, key=lambda p: p[0]), "SFT, ten rates and schedules", *style, linewidth=1.6)
        for method, own in table.items():
            point = _point(own)
            if method != "sft" and point and point[1].mean >= LOWEST:
                _draw(axis, method, *point)
        axis.plot([], [], "o", color=SOFT, alpha=0.5, markersize=3.5, label="another method at its best rate")
        axis.legend(loc="lower right")
    axis.set(xscale="log", xlabel="updates until the new rows are learned", ylabel="Retention (%)")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if str(value)[0] in "235" else "")
    figure.estimates = [estimate([run.retention for run in own]) for own in table.values()]
    caption = (
        "Retention against the number of updates until 99 % of the new rows are learned. Every method has the rate and "
        "schedule that a seed of its own chose; the line is plain fine-tuning over its ladder of rates."
    )
    return picture(figure, "fig:frontier", "Added here", caption)


def _point(own: Sequence[RunResult]) -> tuple[float, Estimate] | None:
    """Mean updates and Retention of runs that all learned everything."""
    if any(run.acquisition < LEARNED for run in own):
        return None
    return sum(map(updates, own)) / len(own), estimate([run.retention for run in own])


def _draw(axis: Any, method: str, x: float, y: Estimate) -> None:
    place = {**NAMED, **PLACES}.get(method)
    if place is None:
        axis.plot([x], [y.mean], "o", color=SOFT, alpha=0.5, markersize=3.5)
        return
    colour, marker = ("#0072B2", "*" if method == RECIPE else "o") if method in OURS else colour_and_marker(method)
    size = 11 if method == RECIPE else 5
    axis.errorbar([x], [y.mean], yerr=[y.error or 0.0], color=colour, marker=marker, markersize=size, capsize=2)
    axis.annotate(method_name(method), (x, y.mean), xytext=place, textcoords="offset points", color=colour, fontsize=8)


def tab_frontier(found: Collected) -> Table:
    """Every method at its own best rate, the furthest above SFT's line first."""
    ahead = "above SFT at equal updates"
    rows = found.studies["frontier"].summary.rows
    rows = tuple(sorted(rows, key=lambda row: -row.figures[ahead].mean if ahead in row.figures else math.inf))
    figures = {
        "updates": "updates",
        "Retention (%)": "retention",
        "above SFT's line (points)": ahead,
        "at equal FLOPs": "above SFT at equal FLOPs",
    }
    return Table(
        label="tab:frontier",
        paper="Added here",
        caption="Every method at its own best rate, chosen on another seed, until 99 % of the new rows are learned.",
        columns=("method", "rate", "warm-up", *figures),
        rows=tuple(
            (
                method_name(row.at["method"]),
                f"{row.at['lr']:.2g}",
                "yes" if row.at["warmup"] else "no",
                *(cell(row.figures.get(name)) for name in figures.values()),
            )
            for row in rows
        ),
    )


def comparison(found: Collected) -> list[ComparisonLine]:
    """The recipe against plain fine-tuning's line."""
    rows = {row.at["method"]: row.figures for row in found.studies["frontier"].summary.rows}
    names = ("retention", "updates", "above SFT at equal updates")
    what = f"{RECIPE}: Retention (%), updates, points above SFT's line at equal updates"
    return [ComparisonLine(what, " / ".join(shown(rows.get(RECIPE, {}).get(n)) for n in names), ADDED_HERE)]
