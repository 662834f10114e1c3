"""The frontier on a chat model: how far the loss of past answers rises where every method has learned equally much.

A chat model learns terse answers; past rows are its own answers to other requests, of any kind (`style`) or
requests for JSON (`format`). Neighbours may choose the rate that suits the reported seeds best, of those declared;
CPLUS has one rate, named before. The loss of a model's own answers also falls where it only becomes more certain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from cplus.evaluation.statistics import Estimate, rise
from cplus.lab.drawing import cell, colour_and_marker, method_name, panels, picture
from cplus.lab.records import RunResult
from cplus.lab.scales import Scale
from cplus.lab.study import ADDED_HERE, Claim, Collected, ComparisonLine, Picture, Summary, SummaryRow, Table
from cplus.lab.summaries import Metric, Seed, by_seed, grouped, mean_of, pick, row, shown
from cplus.training.settings import RunSpec

TITLE = "The frontier on a chat model"
QUESTION = "How much do past answers lose on a chat model where every method has learned equally much?"

LEVEL = 0.85
"""The loss of the new answers, in nats per token, at which methods are compared."""
NEAR = 1.05
"""How far above the level a repaired model may be; set after the three repairs in style had been seen."""
STOP = 0.8
REPAIRED_FROM = 0.68
"""A repair may give up 5 % of the fall of the new loss, so training goes on to here before it."""
EPOCHS = 10
WARMUP = 0.15
FIRST_SEED = 5
"""Seeds below were seen while the setting was made."""
OURS = "cplus"
NEIGHBOURS: Mapping[str, tuple[float, ...]] = {
    "sft": (1.0, 0.5, 2.0),
    "replay": (1.0, 2.0),
    "anchor-probe-replay": (1.0,),
    "freeze-layers": (1.0,),
}
"""Each neighbour's rates as multiples of the scale's."""
WORDS = {"anchors": "anchors given", "general": "none given", "both": "both"}
KEPT = tuple(WORDS)
FORMAT = "json_requests"
IN_FORMAT: Mapping[str, tuple[float, ...]] = {"sft": (1.0, 0.5), "replay": (1.0,)}
"""The neighbours of the second setting."""
SETTINGS = {"style": (NEIGHBOURS, KEPT), "format": (IN_FORMAT, KEPT[:1])}
MANY = 96
"""New rows of a training of common length, against whose time a repair's is held as well."""
CURVED = {"cplus-curvature": 2.0}
"""The row whose coefficients are computed once, and its rate as a multiple of the scale's, named before any run."""


def runs(scale: Scale) -> list[RunSpec]:
    """Seed by seed: CPLUS with each kind of rows to keep, the neighbours over their rates, and a repair of SFT."""
    if scale.base.interface != "freeform":
        return []
    seeds = range(FIRST_SEED, FIRST_SEED + scale.seeds_where_three)
    return [
        *(run for seed in seeds for run in _runs(scale, seed, NEIGHBOURS, KEPT)),
        *(_run(scale, seed, method, rate) for seed in seeds for method, rate in CURVED.items()),
        *(run for seed in seeds for run in _runs(scale, seed, IN_FORMAT, KEPT[:1], anchor_task=FORMAT)),
        _run(scale, FIRST_SEED, "sft-repair", stop_loss=REPAIRED_FROM, num_new=MANY),
    ]


def _runs(
    scale: Scale, seed: int, neighbours: Mapping[str, tuple[float, ...]], kept: Sequence[str], **changes: Any
) -> Iterator[RunSpec]:
    for method, rates in neighbours.items():
        yield _run(scale, seed, method, rates[0], **changes)
    for keep in kept:
        yield _run(scale, seed, OURS, keep=keep, **changes)
    yield _run(scale, seed, "sft-repair", stop_loss=REPAIRED_FROM, **changes)
    for method, rates in neighbours.items():
        for rate in rates[1:]:
            yield _run(scale, seed, method, rate, **changes)


def _run(scale: Scale, seed: int, method: str, rate: float = 1.0, **changes: Any) -> RunSpec:
    own = {"epochs": EPOCHS, "warmup": WARMUP, "stop_loss": STOP, "lr": scale.base.lr * rate}
    return scale.at(**{**own, "seed": seed, "method": method, **changes})


def setting(spec: RunSpec) -> str:
    """What kind of past answers a run has, or that it learns many new ones."""
    if spec.num_new == MANY:
        return f"{MANY} new rows"
    return "format" if spec.anchor_task == FORMAT else "style"


def curve(result: RunResult) -> list[tuple[float, float]]:
    """The losses of new and of past answers, epoch by epoch; after a repair its result is the last point."""
    points = [(point["new_nll"], point["past_nll"]) for point in result.curve]
    if result.new_nll is not None and result.past_nll is not None and (result.new_nll, result.past_nll) != points[-1]:
        points = [points[0], (result.new_nll, result.past_nll)]
    return points


def risen(result: RunResult) -> float | None:
    """The rise of the past loss where the new loss is at the level; None for a run that does not reach it.

    A repaired model is one point: its own rise, where its new loss is at most 5 % above the level.
    """
    points = curve(result)
    if result.spec.method.endswith("-repair"):
        new, past = points[-1]
        return past - points[0][1] if new <= NEAR * LEVEL else None
    return rise(points, LEVEL) if min(new for new, _ in points) <= LEVEL else None


def updates(result: RunResult) -> float | None:
    """The updates until the level, interpolated; a repair has all updates of its training."""
    if result.spec.method.endswith("-repair"):
        return float(result.counts["updates"])
    per_epoch = result.counts["updates"] / result.curve[-1]["epoch"]
    for before, after in pairwise(result.curve):
        if after["new_nll"] <= LEVEL:
            part = (before["new_nll"] - LEVEL) / (before["new_nll"] - after["new_nll"])
            return per_epoch * (before["epoch"] + part * (after["epoch"] - before["epoch"]))
    return None


def share_after_training(result: RunResult) -> float | None:
    """The time that a method took after training, as a share of the training's; None for one that only trains."""
    after: float | None = result.diagnostics.get("seconds_after_training")
    return None if after is None else after / (result.seconds - after)


def summary(mine: Sequence[RunResult]) -> Summary:
    """A row for each setting, method, kind of rows and rate; claims against each neighbour at its best rate."""
    rows: list[SummaryRow] = []
    claims: list[Claim] = []
    answers: list[str] = []
    for where in ("style", "format", f"{MANY} new rows"):
        here = [result for result in mine if setting(result.spec) == where]
        table = grouped(here, lambda run: (run.spec.method, run.spec.keep, run.spec.lr))
        rows += map(_row, table.values())
        if where in SETTINGS:
            neighbours, kept = SETTINGS[where]
            best = {name: _best([own for key, own in table.items() if key[0] == name]) for name in neighbours}
            ours = {f"CPLUS ({WORDS[k]})": by_seed(pick(here, method=OURS, keep=k), risen) for k in kept}
            claims += [
                Claim(f"{where}: {who} loses at most half of what {name} loses at its best rate", _halved(theirs, own))
                for name, theirs in best.items()
                for who, own in ours.items()
            ]
            repaired = by_seed(pick(here, method="sft-repair"), risen)
            words = f"{where}: repair at least halves what sft loses at its best rate"
            claims.append(Claim(words, _halved(best["sft"], repaired)))
            others, gated = (
                ", ".join(f"{shown(mean_of(own), digits=3)} with {name}" for name, own in groups.items())
                for groups in (best, ours)
            )
            answers.append(f"{where}: {others} at its best rate, {gated}")
        spare = {seed: 0.5 - share for seed, share in by_seed(here, share_after_training).items()}
        claims.append(Claim(f"{where}: repair takes at most half of the training's time", mean_of(spare)))
    where = f"Where the new loss is {LEVEL}, the past loss, which certainty alone lowers, has risen by"
    return Summary(rows=tuple(rows), answer=f"{where}: {'; '.join(answers)}.", claims=tuple(claims))


def _halved(theirs: Mapping[Seed, float], ours: Mapping[Seed, float]) -> Estimate | None:
    """How far our rise is below half of theirs, or below theirs where it is a fall, over the seeds of both."""
    return mean_of({seed: min(lost / 2, lost) - ours[seed] for seed, lost in theirs.items() if seed in ours})


def _best(ladder: Sequence[Sequence[RunResult]]) -> dict[Seed, float]:
    """The rung with the lowest mean rise, among those that reach the level on most seeds."""
    reached = [found for own in ladder if (found := by_seed(own, risen))]
    most = max((len(found) for found in reached), default=0)
    full = [found for found in reached if len(found) == most]
    return min(full, key=lambda found: sum(found.values()) / len(found), default={})


COLUMNS: Mapping[str, Metric] = {
    "rise of past loss": risen,
    "updates": updates,
    "new loss at the end": lambda result: result.new_nll,
    "seconds": lambda result: result.seconds,
    "share after training": share_after_training,
}


def _row(own: Sequence[RunResult]) -> SummaryRow:
    first = own[0].spec
    keep = first.keep if first.num_probes else ""
    return row({"past": setting(first), "method": first.method, "keep": keep, "lr": first.lr}, own, COLUMNS)


# The frontier on a chat model: past against new loss while it learns; not in the paper.


LINES = {"anchors": "-", "general": "--", "both": ":"}
TITLES = {"style": "past: answers of any kind", "format": "past: answers in JSON"}


def fig_chat(found: Collected) -> Picture:
    """Every run of the scale's own rate as a line from the base model to where it stopped learning."""
    own = pick(found.studies["chat"].results, lr=found.scale.base.lr)
    figure, axes = panels(len(TITLES), width=8.4, height=3.6, ylabel="rise of the past answers' loss")
    for axis, (name, title) in zip(axes, TITLES.items(), strict=True):
        _draw(axis, [run for run in own if setting(run.spec) == name])
        axis.set(title=title, xlabel="loss of the new answers (nats a token): learned to the right")
    seeds = len({run.spec.seed for run in own})
    caption = (
        f"A chat model learns terse answers; n = {seeds} seeds. Methods are compared where the new loss is {LEVEL}."
    )
    return picture(figure, "fig:chat", "Added here", caption, "")


def _draw(axis: Any, runs: Sequence[RunResult]) -> None:
    if not runs:
        return
    named: set[str] = set()
    for run in runs:
        colour, marker = colour_and_marker(run.spec.method)
        points, label = curve(run), _name(run)
        axis.plot(
            [new for new, _ in points],
            [past - points[0][1] for _, past in points],
            color=colour,
            marker=marker,
            markersize=3,
            linewidth=1.2,
            linestyle=LINES[run.spec.keep],
            label="_" if label in named else label,
        )
        named.add(label)
    axis.axvline(LEVEL, color="#999999", linewidth=0.8, linestyle="--")
    axis.invert_xaxis()
    axis.legend(frameon=False, fontsize=7)


def _name(run: RunResult) -> str:
    name = method_name(run.spec.method)
    return f"{name}, {WORDS[run.spec.keep]}" if run.spec.method == OURS else name


def tab_chat(found: Collected) -> Table:
    """Every method and rate, the smallest rise of each setting first."""
    rows = found.studies["chat"].summary.rows
    rise = "rise of past loss"
    order = list(dict.fromkeys((*TITLES, *(row.at["past"] for row in rows))))
    ordered = sorted(
        rows,
        key=lambda row: (order.index(row.at["past"]), row.figures[rise].mean if rise in row.figures else math.inf),
    )
    return Table(
        label="tab:chat",
        paper="Added here",
        caption=f"The rise of the past answers' loss where the loss of the new answers is {LEVEL}, and what it took.",
        columns=("past", "method", "rows to keep", "rate", "rise (nats a token)", "updates", "seconds"),
        rows=tuple(
            (
                row.at["past"],
                method_name(row.at["method"]),
                WORDS.get(row.at["keep"], "-"),
                f"{row.at['lr']:.2g}",
                shown(row.figures.get(rise), digits=3),
                cell(row.figures.get("updates")),
                cell(row.figures.get("seconds")),
            )
            for row in ordered
        ),
    )


def comparison(found: Collected) -> list[ComparisonLine]:
    """CPLUS with each kind of rows to keep against plain fine-tuning at the same rate."""
    runs = pick(found.studies["chat"].results, lr=found.scale.base.lr)
    runs = [run for run in runs if setting(run.spec) == "style"]
    groups = [pick(runs, method="sft"), *(pick(runs, method=OURS, keep=keep) for keep in KEPT)]
    return [
        ComparisonLine(
            "rise of the past loss at matched learning (style), SFT / CPLUS with anchors / with none given / with both",
            " / ".join(shown(mean_of(by_seed(own, risen)), digits=3) for own in groups),
            ADDED_HERE,
        )
    ]
