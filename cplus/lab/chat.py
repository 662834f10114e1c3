"""Free text at equal learning: how far each method moves a chat model elsewhere, and what that costs.

A chat model learns terse answers. Methods are compared where the loss of held-out new rows has come down to one level:
by KL(base, tuned) at answers of its own to other requests, which are in no bank, and by FLOPs, of what recurs and of
what is done once. Each method has a ladder of rates, from which one seed chooses; other seeds report. The loss of past
answers is only shown: it also falls where a model becomes more certain of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cplus.evaluation.statistics import Estimate, crossing
from cplus.lab.drawing import SOFT, cell, colour_and_marker, panels, picture
from cplus.lab.records import RunResult
from cplus.lab.scales import Scale
from cplus.lab.study import ADDED_HERE, Claim, Collected, ComparisonLine, Picture, Summary, SummaryRow, Table
from cplus.lab.summaries import Metric, Seed, by_seed, flops, grouped, mean_of, pick, row, shown
from cplus.training.settings import RunSpec

TITLE = "Free text at equal learning"
QUESTION = "How far does each method move a chat model elsewhere where all have learned equally well, at what cost?"

SELECTION = 100
"""The seed that chooses the level and each method's rate, and reports nothing."""
SEEDS = (101, 102, 103, 104)
ABOVE = 0.1
LEVEL = 2.68
"""The loss of held-out new rows at which methods are compared: SFT's lowest at its chosen rate, plus `ABOVE`."""
FIRST_LEVEL = 2.58
"""The same from SFT's whole ladder, where the first runs on the selection seed ended, those at twice the rate. Of the
gate and the divergence two stayed above it, at 2.60 and 3.01; the level took its place before another seed was run."""
EPOCHS = 4
"""At most; training ends with the epoch that reaches the level."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A method with the rows it keeps, its ladder of rates as multiples of the scale's, and the chosen rate."""

    method: str
    rates: tuple[float, ...]
    strength: float | None = None
    keep: Literal["anchors", "general"] = "general"
    probes: int = 0
    best: float | None = None

    def run(self, scale: Scale, seed: int, rate: float, stop: float | None, **rows: str) -> RunSpec:
        """The run with a seed and a rate."""
        own = {"method": self.method, "keep": self.keep, "num_probes": self.probes, "strength": self.strength}
        return scale.at(**own, **rows, seed=seed, lr=scale.base.lr * rate, epochs=EPOCHS, stop_loss=stop)


WAYS = {
    "SFT": Way(method="sft", keep="anchors", rates=(0.5, 1.0, 2.0), best=0.5),
    "divergence, weight 2": Way(method="divergence", strength=2.0, probes=16, rates=(2.0, 1.0), best=2.0),
    "CPLUS": Way(method="cplus", probes=16, rates=(2.0, 1.0, 4.0), best=2.0),
    "self-replay": Way(method="self-replay", probes=16, rates=(2.0, 1.0, 4.0)),
    "divergence, weight 1": Way(method="divergence", strength=1.0, probes=16, rates=(2.0, 1.0)),
    "divergence, weight 4": Way(method="divergence", strength=4.0, probes=16, rates=(2.0, 1.0)),
    "divergence, weight 16": Way(method="divergence", probes=48, rates=(2.0,)),
    "divergence and CPLUS": Way(method="divergence-cplus", strength=2.0, probes=16, rates=(2.0, 4.0)),
    "Replay of anchors": Way(method="replay", keep="anchors", rates=(1.0, 2.0)),
}
"""A bank has eight more rows than probes, as anchors: 24 in all, as `cplus adapt` writes them; the first run had 56."""


def runs(scale: Scale) -> list[RunSpec]:
    """SFT's ladder, which gives the level; all ladders on the selection seed; the chosen rates on the other seeds."""
    if scale.base.interface != "freeform":
        return []
    plain = WAYS["SFT"]
    found = [plain.run(scale, SELECTION, rate, None) for rate in plain.rates]
    others = [way for way in WAYS.values() if way != plain]
    level = {2.0: FIRST_LEVEL}
    ladders = [way.run(scale, SELECTION, rate, level.get(rate, LEVEL)) for way in others for rate in way.rates]
    return [*found, *ladders, *repeated(scale, SEEDS)]


def repeated(scale: Scale, seeds: Sequence[int], **rows: str) -> list[RunSpec]:
    """Every chosen way on these seeds, and with `task` and `anchor_task` on other new and past rows.

    Other rows have another level, which is not known before: training does not end there.
    """
    if SELECTION in seeds:
        raise ValueError(f"seed {SELECTION} chose the level and the rates, so it cannot report; expected other seeds")
    stop = None if rows else LEVEL
    return [way.run(scale, seed, way.best, stop, **rows) for seed in seeds for way in WAYS.values() if way.best]


def way_of(spec: RunSpec) -> str:
    """The name of the way that a run belongs to."""
    own = (spec.method, spec.strength, spec.num_probes)
    return next((name for name, way in WAYS.items() if (way.method, way.strength, way.probes) == own), spec.method)


def level_of(results: Sequence[RunResult]) -> float:
    """The level of runs on the same rows: fixed before for the study's own, else SFT's lowest loss of any seed."""
    if all(result.spec.stop_loss or result.spec.seed == SELECTION for result in results):
        return LEVEL
    lowest = [min(point["held_nll"] for point in result.curve) for result in pick(results, method="sft")]
    return max(lowest, default=-math.inf) + ABOVE


def at(result: RunResult, level: float) -> dict[str, float] | None:
    """Epoch, divergence and recurring FLOPs where the held-out loss first reaches the level; None if it never does."""
    if min(point["held_nll"] for point in result.curve) > level:
        return None
    epoch, far = (crossing([(p["held_nll"], p[name]) for p in result.curve], level) for name in ("epoch", "divergence"))
    return {"epoch": epoch, "divergence": far, "flops": flops(result) * epoch / result.curve[-1]["epoch"]}


def metrics(level: float) -> dict[str, Metric]:
    """What a table shows of a run; a run that does not reach the level has no divergence and no cost."""

    def point(name: str, scale: float = 1.0) -> Metric:
        return lambda result: found[name] / scale if (found := at(result, level)) else None

    return {
        "divergence": point("divergence"),
        "epochs": point("epoch"),
        "recurring TFLOP": point("flops", 1e12),
        "once TFLOP": lambda result: once(result) / 1e12,
        "total TFLOP": lambda result: (found["flops"] + once(result)) / 1e12 if (found := at(result, level)) else None,
        "lowest held-out loss": lambda result: min(point["held_nll"] for point in result.curve),
        "past loss at the end": lambda result: result.past_nll,
        "exact answers kept": lambda result: result.retention_uncovered,
        "seconds": lambda result: result.seconds,
    }


def once(result: RunResult) -> float:
    """FLOPs of what does not recur; a method without a bank has none written."""
    return sum(result.once.values()) if result.counts["probes"] or result.once.get("after_flops") else 0.0


def chosen(results: Sequence[RunResult], level: float) -> dict[str, tuple[float, bool]]:
    """Each way's rate with the lowest divergence on the selection seed, and whether its ladder ends there."""
    found = {}
    for name, own in grouped(pick(results, seed=SELECTION), lambda result: way_of(result.spec)).items():
        rungs = {result.spec.lr: (at(result, level) or {"divergence": math.inf})["divergence"] for result in own}
        best = min(rungs, key=rungs.__getitem__)
        if rungs[best] < math.inf:
            found[name] = best, best in (min(rungs), max(rungs))
    return found


def summary(mine: Sequence[RunResult]) -> Summary:
    """A row for each way and rate, those of the selection seed apart; the bars of the default, and its neighbours."""
    level, rows = level_of(mine), list[SummaryRow]()
    ends = chosen(mine, level)
    for (name, rate, choosing), own in grouped(mine, lambda r: (way_of(r.spec), r.spec.lr, _chooses(r))).items():
        said = "" if any(at(result, level) for result in own) else "does not reach the level"
        if choosing and ends.get(name) == (rate, True):
            said = "best at its ladder's end"
        key = {"way": name, "lr": rate, "seeds": "chooses" if choosing else "reports", "remark": said}
        rows.append(row(key, own, metrics(level)))
    reports = grouped([result for result in mine if not _chooses(result)], lambda result: way_of(result.spec))
    kept, cost = (
        {name: by_seed(own, metrics(level)[figure]) for name, own in reports.items()}
        for figure in ("divergence", "total TFLOP")
    )
    claims = [
        Claim(f"{OURS} moves the model at most 0.4 times as far as SFT", _less(kept, "SFT", 0.4)),
        Claim(f"{OURS} costs at most 1.6 times as much as SFT", _less(cost, "SFT", 1.6)),
        *(
            Claim(f"{OURS} moves the model less than {name} at its best rate", _less(kept, name, 1.0))
            for name, way in WAYS.items()
            if way.best and name != OURS
        ),
    ]
    said = "; ".join(
        f"{name} {shown(mean_of(own), digits=3)} for {shown(mean_of(cost[name]))} TFLOP" for name, own in kept.items()
    )
    answer = (
        f"Where the loss of held-out new rows is {level:.2f}, KL(base, tuned) at other requests: {said or 'not run'}."
    )
    return Summary(rows=tuple(rows), answer=answer, claims=tuple(claims))


OURS = "divergence, weight 2"
"""The way that the claims are about."""


def _chooses(result: RunResult) -> bool:
    return result.spec.seed == SELECTION


def _less(found: Mapping[str, Mapping[Seed, float]], other: str, factor: float) -> Estimate | None:
    """How far ours is below a factor of another's, over the seeds of both."""
    ours, theirs = found.get(OURS, {}), found.get(other, {})
    return mean_of({seed: factor * value - ours[seed] for seed, value in theirs.items() if seed in ours})


def fig_chat(found: Collected) -> Picture:
    """What every way keeps against its cost, at equal learning: the lower and the further left the better."""
    study = found.studies["chat"]
    rows = [row for row in study.summary.rows if "divergence" in row.figures]
    reports = [row for row in rows if row.at["seeds"] == "reports"]
    figure, [axis] = panels(1, width=6.4, height=3.6, ylabel="KL(base, tuned) elsewhere (nats a token)")
    for each in reports:
        colour, marker = colour_and_marker(WAYS[each.at["way"]].method)
        x, y = each.figures["total TFLOP"], each.figures["divergence"]
        figure.estimates.append(y)
        axis.errorbar([x.mean], [y.mean], yerr=[y.error or 0.0], xerr=[x.error or 0.0], color=colour, marker=marker)
        axis.annotate(each.at["way"], (x.mean, y.mean), (6, 5), textcoords="offset points", color=colour, fontsize=8)
    others = [row for row in rows if row.at["seeds"] == "chooses"]
    axis.plot(
        [row.figures["total TFLOP"].mean for row in others],
        [row.figures["divergence"].mean for row in others],
        "o", color=SOFT, alpha=0.4, markersize=3, linestyle="none", label="the ladders on the seed that chose",
    )  # fmt: skip
    axis.set(
        xlabel="TFLOP until equal learning, the writing of the rows to keep included", xlim=(0, None), ylim=(0, None)
    )
    caption = (
        f"How far a chat model has moved elsewhere against what its training cost, where the loss of held-out new rows "
        f"is {level_of(study.results):.2f}."
    )
    return picture(figure, "fig:chat", "Added here", caption)


def tab_chat(found: Collected) -> Table:
    """Every way and rate, those that report first, the smallest divergence first."""
    figures = ("divergence", "recurring TFLOP", "once TFLOP", "past loss at the end", "exact answers kept", "seconds")
    rows = sorted(
        found.studies["chat"].summary.rows,
        key=lambda row: (
            row.at["seeds"] == "chooses",
            row.figures["divergence"].mean if "divergence" in row.figures else math.inf,
        ),
    )

    def shown_as(row: SummaryRow, name: str) -> Any:
        many = name in ("divergence", "past loss at the end")
        return shown(row.figures.get(name), digits=3) if many else cell(row.figures.get(name))

    return Table(
        label="tab:chat",
        paper="Added here",
        caption="KL(base, tuned) at requests in no bank, where the held-out new rows are learned equally well.",
        columns=("way", "rate", "seeds", *figures, "remark"),
        rows=tuple(
            (
                row.at["way"],
                f"{row.at['lr']:.2g}",
                row.at["seeds"],
                *(shown_as(row, name) for name in figures),
                row.at["remark"],
            )
            for row in rows
        ),
    )


def comparison(found: Collected) -> list[ComparisonLine]:
    """The divergence and the cost of SFT, CPLUS and the way that the claims are about."""
    rows = {row.at["way"]: row.figures for row in found.studies["chat"].summary.rows if row.at["seeds"] == "reports"}
    names = ("SFT", "CPLUS", OURS)
    return [
        ComparisonLine(
            f"{figure} at equal learning, {' / '.join(names)}",
            " / ".join(shown(rows.get(name, {}).get(figure), digits=3) for name in names),
            ADDED_HERE,
        )
        for figure in ("divergence", "total TFLOP")
    ]
