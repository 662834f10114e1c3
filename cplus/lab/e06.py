"""E6: how do Acquisition, Retention and cost evolve during adaptation?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cplus.evaluation.statistics import Estimate, estimate
from cplus.lab import drawing
from cplus.lab.records import RunResult
from cplus.lab.scales import Scale
from cplus.lab.study import Claim, Collected, ComparisonLine, Picture, Published, Summary, SummaryRow, judged
from cplus.lab.summaries import above, flops, grouped, leads, margin, over_seeds, pick, retained, seed_of, shown, table
from cplus.training.settings import RunSpec

TITLE = "Dynamics and cost"
QUESTION = "How do Acquisition, Retention and computational cost evolve during adaptation?"
PAPER = "Sec. 4.6; Figs. 7, 8, 12; App. E.3, E.12"
PUBLISHED_0 = Published("Sec. 4.6, first epoch at 100 % Acquisition", {"cplus": 5, "replay": 5, "cpl": 10})

CURVES = ("sft", "replay", "cpl", "cplus")
COMPARED = ("sft", "replay", "distillation", "ssr", "agem", "ogd", "cpl", "cplus")


def runs(scale: Scale) -> list[RunSpec]:
    """Four methods evaluated after every epoch; eight methods with a small bank, compared by cost, at three sizes.

    Paper: App. E.3, the curves are computed in FP32, unlike the grid.
    """
    task = scale.base.task
    sizes = [cell for cell in scale.grid if cell.task == task][:3]
    return [
        *(
            scale.at(method=m, evaluate_every=1, external=(), compute_dtype=scale.curve_dtype, seed=s)
            for m in CURVES
            for s in range(scale.seeds_where_one)
        ),
        *(
            scale.at(model=cell.model, lr=cell.lr, method=method, num_probes=scale.small_bank, seed=seed)
            for cell in sizes
            for method in COMPARED
            for seed in range(scale.seeds_where_one)
        ),
    ]


def first_full(result: RunResult) -> float | None:
    """The first epoch at full Acquisition; None if there is none."""
    return next((point["epoch"] for point in result.curve if point["acquisition"] >= 100.0), None)


def lowest(result: RunResult) -> float | None:
    """The lowest Retention of the curve."""
    return min((point["retention"] for point in result.curve), default=None)


def summary(results: Sequence[RunResult]) -> Summary:
    """Full Acquisition, lowest and final Retention by method; gain and cost relative to SFT by model and method."""
    curves = [result for result in results if result.curve]
    ends = [result for result in results if not result.curve]
    points = table(
        curves,
        ("method",),
        {"first full epoch": first_full, "lowest retention": lowest, "final retention": retained},
    )
    costs = tuple(row for own in grouped(ends, lambda r: r.spec.model).values() for row in _costs(own))
    words = "with the small bank CPLUS keeps more than {}"
    claims = leads(words, ends, COMPARED[:-1], paper="Sec. 4.6; Fig. 7") + _dynamics(curves)
    full = {name: over_seeds(pick(curves, method=name), first_full) for name in ("cpl", "cplus")}
    ratio = [row.figures["cost"].mean for row in costs if row.at["method"] == "cplus"]
    times = " / ".join(f"{value:.2f}" for value in ratio) or "not run"
    answer = (
        f"CPLUS first learns everything after {shown(full['cplus'])} epochs, CPL after {shown(full['cpl'])}; with the "
        f"small bank CPLUS costs {times} times SFT's FLOPs; {judged(claims)}."
    )
    return Summary(rows=(*points, *costs), answer=answer, claims=tuple(claims))


def _dynamics(curves: Sequence[RunResult]) -> list[Claim]:
    """The paper's claims on the curves: speed, the lead after full Acquisition, replay's lead, late recovery."""
    own = {name: pick(curves, method=name) for name in CURVES}
    return [
        above(
            "CPLUS reaches full Acquisition in fewer epochs than cpl",
            own["cpl"],
            own["cplus"],
            first_full,
            paper="Sec. 4.6; Figs. 8, 12",
        ),
        *(
            Claim(
                f"from its full Acquisition on CPLUS is above {name} at every epoch",
                least_lead(own["cplus"], own[name]),
                paper="Sec. 4.6; Figs. 8, 12",
            )
            for name in CURVES[:-1]
        ),
        above(
            "after the first epoch replay has kept more than sft",
            own["replay"],
            own["sft"],
            lambda result: result.curve[0]["retention"],
            paper="Sec. 4.6; Fig. 8",
        ),
        above("at the end replay keeps more than sft", own["replay"], own["sft"], paper="Sec. 4.6; Fig. 8"),
        *(
            Claim(
                f"{name}: Retention rises again after full Acquisition",
                over_seeds(own[name], recovered),
                paper="Sec. 4.6; App. E.3; Figs. 8, 12",
            )
            for name in CURVES
        ),
    ]


def recovered(result: RunResult) -> float | None:
    """Retention at the end minus Retention at the first epoch of full Acquisition; None if there is none.

    The lowest point of the curve is not used: the difference from it can only be positive.
    """
    full = first_full(result)
    at_full = [point["retention"] for point in result.curve if point["epoch"] == full]
    return result.curve[-1]["retention"] - at_full[0] if at_full else None


def least_lead(ours: Sequence[RunResult], others: Sequence[RunResult]) -> Estimate | None:
    """The smallest lead in Retention from our first epoch at full Acquisition on, paired by seed."""
    mine, theirs = ({seed_of(result): result for result in group} for group in (ours, others))
    leads = []
    for seed, result in mine.items():
        other, full = theirs.get(seed, theirs.get(None)), first_full(result)
        if other is not None and full is not None:
            pairs = zip(result.curve, other.curve, strict=True)
            leads.append(min(one["retention"] - two["retention"] for one, two in pairs if one["epoch"] >= full))
    return estimate(leads) if leads else None


def _costs(here: Sequence[RunResult]) -> list[SummaryRow]:
    plain, rows = pick(here, method="sft"), []
    if not plain:
        return []
    unit = flops(plain[0])
    for method in COMPARED:
        own = pick(here, method=method)
        gain = margin(own, plain)
        cost = over_seeds(own, lambda result: flops(result) / unit)
        if gain is not None and cost is not None:
            figures: dict[str, Estimate] = {"gain over SFT": gain, "cost": cost}
            rows.append(SummaryRow(at={"model": here[0].spec.model, "method": method}, figures=figures))
    return rows


# E6, dynamics and cost: Retention against FLOPs (Fig. 7) and over the epochs (Figs. 8, 12).


def fig_retention_compute(found: Collected) -> Picture:
    """Retention gained over SFT against FLOPs relative to SFT, one panel per model.

    Paper: Fig. 7.
    """
    rows = [row for row in found.studies["e06"].summary.rows if "gain over SFT" in row.figures]
    models = sorted({row.at["model"] for row in rows}, key=drawing.model_size) or [found.scale.base.model]
    figure, axes = drawing.panels(len(models), width=3.3, height=2.8, ylabel="Retention gained over SFT (points)")
    for axis, model in zip(axes, models, strict=True):
        here = [row for row in rows if row.at["model"] == model]
        for row in here:
            points, method = [(row.figures["cost"].mean, row.figures["gain over SFT"])], row.at["method"]
            drawing.line(
                axis,
                points,
                drawing.method_name(method),
                *drawing.colour_and_marker(method),
                linestyle="none",
                markersize=6,
            )
        _cost_axis(axis, [row.figures["cost"].mean for row in here])
        axis.set(title=model, xlabel="training FLOPs (times SFT's, log scale)")
    caption = (
        f"Retention gained over SFT against training FLOPs relative to SFT, A = {found.scale.anchors}, "
        f"N = {found.scale.small_bank} probes; one-time preparation is left out. Vertical scales differ."
    )
    return drawing.picture(figure, "fig:retention-compute", "Fig. 7", caption)


def _cost_axis(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic axis of factors with plain numbers."""
    axis.set_xscale("log", base=2)
    marks = [1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64]
    ticks = [mark for mark in marks if mark <= 1.3 * max(values, default=1.0)]
    axis.set_xticks(ticks, [f"{mark:g}×" for mark in ticks])
    axis.set_xticks([], minor=True)


def fig_learning_dynamics(found: Collected) -> Picture:
    """Retention over epochs, and the path of Acquisition and Retention.

    Paper: Fig. 8.
    """
    own = found.studies["e06"].results
    figure, (left, right) = drawing.panels(2, width=4.0, height=2.9)
    _over_epochs(left, own, "retention")
    draw_path(right, own)
    caption = (
        f"Left: Retention after every epoch. Right: the path of Acquisition and Retention. A = {found.scale.anchors}. "
        "Large markers are the first epoch with full Acquisition."
    )
    return drawing.picture(figure, "fig:learning-dynamics", "Fig. 8", caption, "Error bars (left) are standard errors")


def fig_epoch_level_dynamics(found: Collected) -> Picture:
    """Retention and Acquisition after every epoch, and the path of both.

    Paper: Fig. 12.
    """
    own = found.studies["e06"].results
    figure, (left, middle, right) = drawing.panels(3, width=3.2, height=2.7)
    _over_epochs(left, own, "retention")
    _over_epochs(middle, own, "acquisition")
    draw_path(right, own)
    right.set_ylim(left.get_ylim())
    caption = (
        "Retention and Acquisition after every epoch, and the path of both, on the scale of the left panel. "
        f"A = {found.scale.anchors}, learning rate {found.scale.base.lr:g}."
    )
    return drawing.picture(figure, "fig:epoch-level-dynamics", "Fig. 12", caption, "Error bars are standard errors")


def _over_epochs(axis: Any, results: Sequence[RunResult], name: str) -> None:
    series = {method: _curve(results, method, name) for method in CURVES}
    drawing.lines(axis, series)
    for method, points in series.items():
        _mark_first_full(
            axis, points, points, _curve(results, method, "acquisition"), drawing.colour_and_marker(method)[0]
        )
    axis.locator_params(axis="x", integer=True)
    axis.set(xlabel="epochs", ylabel=f"{name.capitalize()} (%)")


def draw_path(axis: Any, results: Sequence[RunResult]) -> None:
    """Retention against Acquisition, epoch by epoch."""
    for method in CURVES:
        colour, marker = drawing.colour_and_marker(method)
        kept, learned = _curve(results, method, "retention"), _curve(results, method, "acquisition")
        across, up = [found.mean for _, found in learned], [found.mean for _, found in kept]
        if kept:
            name = drawing.method_name(method)
            axis.plot(across, up, color=colour, marker=marker, markersize=3.5, linewidth=1.3, label=name)
        _mark_first_full(axis, [(found.mean, found) for _, found in learned], kept, learned, colour)
    axis.set(xlabel="Acquisition (%)", ylabel="Retention (%)")


def _curve(results: Sequence[RunResult], method: str, name: str) -> drawing.Points:
    """Retention or Acquisition after every epoch; by definition the base model has 100 and 0 percent."""
    own = [result for result in pick(results, method=method) if result.curve]
    if not own:
        return []
    start = estimate([100.0 if name == "retention" else 0.0] * len(own))
    epochs = [point["epoch"] for point in own[0].curve]
    after = [(e, estimate([result.curve[i][name] for result in own])) for i, e in enumerate(epochs)]
    return [(0.0, start), *after]


def _mark_first_full(
    axis: Any, across: drawing.Points, up: drawing.Points, learned: drawing.Points, colour: str
) -> None:
    """A large filled marker at the first epoch whose mean Acquisition is full."""
    for (x, _), (_, y), (_, now) in zip(across, up, learned, strict=True):
        if now.mean >= 100.0:
            axis.plot([x], [y.mean], marker="o", markersize=9, color=colour, zorder=4)
            return


def comparison(found: Collected) -> list[ComparisonLine]:
    """The first epoch at full Acquisition, with the paper's, and the cost of CPLUS."""
    own = found.studies["e06"]
    curves = [result for result in own.results if result.curve]
    ours = [row.figures for row in own.summary.rows if row.at.get("method") == "cplus"]
    costs = [figures["cost"] for figures in ours if "cost" in figures]
    return [
        drawing.compare_methods(
            "first epoch at full Acquisition, CPLUS / Replay / CPL",
            curves,
            ("cplus", "replay", "cpl"),
            PUBLISHED_0.numbers,
            first_full,
        ),
        ComparisonLine(
            "FLOPs of CPLUS with the small bank, times SFT's, by model",
            " / ".join(f"{cost.mean:.2f}" for cost in costs) or "not run",
            "in a figure only",
        ),
    ]
