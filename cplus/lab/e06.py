"""E6: how do Acquisition, Retention and cost evolve during adaptation?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cplus.evaluation.statistics import Estimate, estimate
from cplus.lab import drawing, summaries
from cplus.lab.records import RunResult
from cplus.lab.scales import METHODS, Scale
from cplus.lab.study import Claim, Collected, ComparisonLine, Picture, Published, Summary, SummaryRow, judged
from cplus.lab.summaries import above, leads, margin, over_seeds, pick, retained, shown, table
from cplus.training.settings import RunSpec

TITLE = "Dynamics and cost"
QUESTION = "How do Acquisition, Retention and computational cost evolve during adaptation?"
PAPER = "Sec. 4.6; Figs. 7, 8, 12; App. E.3, E.12"
FULL_AT = Published("Sec. 4.6, first epoch at 100 % Acquisition", {"cplus": 5, "replay": 5, "cpl": 10})

COMPARED = ("sft", "replay", "distillation", "ssr", "agem", "ogd", "cpl", "cplus")


def runs(scale: Scale) -> list[RunSpec]:
    """Four methods evaluated after every epoch; eight methods with a small bank, compared by cost, at three sizes.

    Paper: App. E.3, the curves are computed in FP32, unlike the grid.
    """
    task = scale.base.task
    sizes = [cell for cell in scale.grid if cell.task == task][:3]
    seeds, bank = range(scale.seeds_where_one), scale.small_bank
    each_epoch = {"evaluate_every": 1, "external": (), "compute_dtype": scale.curve_dtype}
    found = scale.each({"method": METHODS, "seed": seeds}, **each_epoch)
    for cell in sizes:
        found += scale.each({"method": COMPARED, "seed": seeds}, **cell.place, num_probes=bank)
    return found


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
    figures = {"first full epoch": first_full, "lowest retention": lowest, "final retention": retained}
    points = table(curves, ("method",), figures)
    costs = tuple(row for own in summaries.grouped(ends, lambda r: r.spec.model).values() for row in _costs(own))
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
    own = {name: pick(curves, method=name) for name in METHODS}
    replay, sft, both = own["replay"], own["sft"], "Sec. 4.6; Figs. 8, 12"
    words = "CPLUS reaches full Acquisition in fewer epochs than cpl"
    early = "after the first epoch replay has kept more than sft"
    lead, rises = "from its full Acquisition on CPLUS is above {} at every epoch", "Retention rises again after full"
    return [
        above(words, own["cpl"], own["cplus"], first_full, paper=both),
        *(Claim(lead.format(name), least_lead(own["cplus"], own[name]), both) for name in METHODS[:-1]),
        above(early, replay, sft, lambda result: result.curve[0]["retention"], paper="Sec. 4.6; Fig. 8"),
        above("at the end replay keeps more than sft", replay, sft, paper="Sec. 4.6; Fig. 8"),
        *(
            Claim(f"{name}: {rises} Acquisition", over_seeds(own[name], recovered), "Sec. 4.6; App. E.3; Figs. 8, 12")
            for name in METHODS
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
    mine, theirs = ({summaries.seed_of(result): result for result in group} for group in (ours, others))
    leads = []
    for seed, result in mine.items():
        other, full = theirs.get(seed, theirs.get(None)), first_full(result)
        if other is not None and full is not None:
            pairs = zip(result.curve, other.curve, strict=True)
            leads.append(min(one["retention"] - two["retention"] for one, two in pairs if one["epoch"] >= full))
    return estimate(leads) if leads else None


def _costs(here: Sequence[RunResult]) -> list[SummaryRow]:
    """The gain over SFT and the cost in units of SFT's, by method."""
    plain, rows = pick(here, method="sft"), []
    for method in COMPARED if plain else ():
        own = pick(here, method=method)
        cost = over_seeds(own, lambda result: summaries.flops(result) / summaries.flops(plain[0]))
        if (gain := margin(own, plain)) is not None and cost is not None:
            at = {"model": here[0].spec.model, "method": method}
            rows.append(SummaryRow(at=at, figures={"gain over SFT": gain, "cost": cost}))
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
            name, style = drawing.method_name(method), drawing.colour_and_marker(method)
            drawing.line(axis, points, name, *style, linestyle="none", markersize=6)
        most = max((row.figures["cost"].mean for row in here), default=1.0)
        ticks = [mark for mark in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64) if mark <= 1.3 * most]
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{mark:g}×" for mark in ticks])
        axis.set_xticks([], minor=True)
        axis.set(title=model, xlabel="training FLOPs (times SFT's, log scale)")
    caption = (
        f"Retention gained over SFT against training FLOPs relative to SFT, A = {found.scale.anchors}, "
        f"N = {found.scale.small_bank} probes; one-time preparation is left out. Vertical scales differ."
    )
    return drawing.picture(figure, "fig:retention-compute", "Fig. 7", caption)


def fig_learning_dynamics(found: Collected) -> Picture:
    """Retention over epochs, and the path of Acquisition and Retention.

    Paper: Fig. 8.
    """
    figure, (left, right) = drawing.panels(2, width=4.0, height=2.9)
    own = found.studies["e06"].results
    draw_curves(left, own, "epochs", "retention")
    draw_curves(right, own, "acquisition", "retention")
    caption = (
        f"Left: Retention after every epoch. Right: the path of Acquisition and Retention. A = {found.scale.anchors}. "
        "Large markers are the first epoch with full Acquisition."
    )
    return drawing.picture(figure, "fig:learning-dynamics", "Fig. 8", caption, "Error bars (left) are standard errors")


def fig_epoch_level_dynamics(found: Collected) -> Picture:
    """Retention and Acquisition after every epoch, and the path of both.

    Paper: Fig. 12.
    """
    figure, (left, middle, right) = drawing.panels(3, width=3.2, height=2.7)
    own = found.studies["e06"].results
    draw_curves(left, own, "epochs", "retention")
    draw_curves(middle, own, "epochs", "acquisition")
    draw_curves(right, own, "acquisition", "retention")
    right.set_ylim(left.get_ylim())
    caption = (
        "Retention and Acquisition after every epoch, and the path of both, on the scale of the left panel. "
        f"A = {found.scale.anchors}, learning rate {found.scale.base.lr:g}."
    )
    return drawing.picture(figure, "fig:epoch-level-dynamics", "Fig. 12", caption, "Error bars are standard errors")


def draw_curves(axis: Any, results: Sequence[RunResult], x: str, y: str) -> None:
    """Retention or Acquisition after every epoch, or one against the other; by definition they begin at 100 and 0.

    A large marker is the first epoch whose mean Acquisition is full.
    """
    for method in METHODS:
        own = [result for result in pick(results, method=method) if result.curve]
        if not own:
            continue
        after = {"epochs": [0.0], "retention": [100.0], "acquisition": [0.0]}
        found = {name: [estimate(begin * len(own))] for name, begin in after.items()}
        for i, point in enumerate(own[0].curve):
            found["epochs"].append(estimate([point["epoch"]]))
            for name in ("retention", "acquisition"):
                found[name].append(estimate([result.curve[i][name] for result in own]))
        shown_errors = [each if x == "epochs" else replace(each, error=None) for each in found[y]]
        points = [(one.mean, other) for one, other in zip(found[x], shown_errors, strict=True)]
        drawing.lines(axis, {method: points})
        full = [point for point, learned in zip(points, found["acquisition"], strict=True) if learned.mean >= 100.0]
        for across, up in full[:1]:
            axis.plot([across], [up.mean], "o", markersize=9, color=drawing.colour_and_marker(method)[0], zorder=4)
    axis.locator_params(axis="x", integer=x == "epochs")
    axis.set(xlabel="epochs" if x == "epochs" else f"{x.capitalize()} (%)", ylabel=f"{y.capitalize()} (%)")


def comparison(found: Collected) -> list[ComparisonLine]:
    """The first epoch at full Acquisition, with the paper's."""
    curves = [result for result in found.studies["e06"].results if result.curve]
    methods = ("cplus", "replay", "cpl")
    what = "first epoch at full Acquisition, CPLUS / Replay / CPL"
    return [drawing.compare_methods(what, curves, methods, FULL_AT.numbers, first_full)]
