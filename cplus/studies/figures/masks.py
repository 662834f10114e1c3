"""The figures of E9 and E10: what the masks admit, and how they agree with those of all past rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cplus.evaluation.statistics import Estimate, estimate
from cplus.experiment.record import RunResult
from cplus.studies.collected import Collected
from cplus.studies.e10 import KINDS
from cplus.studies.figures.drawing import Picture, Points, budgets, counted, empty, heat, legend, line, lines, sheet
from cplus.studies.figures.grid import by_budget
from cplus.studies.summaries import pick


def fig_gradient_source_dynamics(found: Collected) -> Picture:
    """The shares of coordinates and of update energy that the instantaneous masks admit, over training.

    Paper: Fig. 13.
    """
    watched = [result for result in found.studies["e09"].runs if "geometry" in result.diagnostics]
    figure, axes = sheet(2, width=3.8, height=2.7, share=True)
    drawn: list[Estimate] = []
    for axis, kind in zip(axes, ("coordinates", "energy"), strict=True):
        series = {method: _admitted(pick(watched, method=method), kind) for method in ("cpl", "cplus")}
        lines(axis, series)
        axis.locator_params(axis="x", integer=True)
        axis.set(title=f"admitted {kind}", xlabel="epochs completed")
        drawn += [found for points in series.values() for _, found in points]
    axes[0].set_ylabel("share admitted")
    legend(figure)
    caption = (
        "What the masks admit of the proposed updates before smoothing, at a few states of training. Left: share of "
        f"coordinates. Right: share of squared update size. Means and standard errors, {counted(drawn)}."
    )
    return Picture(label="fig:gradient-source-dynamics", paper="Fig. 13", caption=caption, figure=figure)


def _admitted(results: Sequence[RunResult], kind: str) -> Points:
    states: dict[float, list[float]] = {}
    for result in results:
        for state in result.diagnostics["geometry"]:
            states.setdefault(state["completed_epochs"], []).append(state["mask"][kind])
    return [(epoch, estimate(values)) for epoch, values in sorted(states.items())]


def _audits(found: Collected) -> list[dict[str, Any]]:
    return [r.diagnostics["audit"] for r in found.studies["e10"].runs if "audit" in r.diagnostics]


def _agreement(audits: Sequence[dict[str, Any]], kind: str) -> Points:
    """Agreement by budget over the seeds."""
    if not audits:
        return []
    return [(a, estimate([audit[kind][i] for audit in audits])) for i, a in enumerate(audits[0]["budgets"])]


def _agreements(axis: Any, audits: Sequence[dict[str, Any]]) -> list[Estimate]:
    series = {kind: _agreement(audits, kind) for kind in ("cpl", "cplus")}
    lines(axis, series)
    budgets(axis, audits[0]["budgets"] if audits else ())
    axis.set_ylabel("agreement with own reference")
    return [estimate for points in series.values() for _, estimate in points]


def fig_mask_analysis(found: Collected) -> Picture:
    """Each method's agreement with its own full-data mask, beside its Retention.

    Paper: Fig. 14.
    """
    figure, (left, right) = sheet(2, width=3.8, height=2.8)
    drawn = _agreements(left, _audits(found))
    left.set_title("agreement")
    plain = [result for result in found.studies["e10"].runs if not result.spec.diagnose]
    lines(right, {method: by_budget(plain, method) for method in ("cpl", "cplus")})
    budgets(right, (result.spec.num_anchors for result in plain))
    right.set(title="Retention", ylabel="Retention (%)")
    legend(figure)
    caption = (
        "Left: update-weighted agreement of each method's mask with that of all past rows, over the same proposals at "
        f"fixed weights, {counted(drawn)}. Right: Retention of the runs of E1 at the same budgets. Error bars are "
        "standard errors."
    )
    return Picture(label="fig:mask-analysis", paper="Fig. 14", caption=caption, figure=figure)


def fig_mask_analysis_coordinates(found: Collected) -> Picture:
    """CPLUS's mean mask at 512 coordinates by budget, and each method's agreement.

    Paper: Fig. 15.
    """
    audits = _audits(found)
    figure, (left, right) = sheet(2, width=4.6, height=2.8)
    if audits:
        own = audits[0]["coordinates"]["cplus"]
        rows = [*sorted((key for key in own if key != "past"), key=int), "past"]
        values = [[float(value) for value in own[key].split()] for key in rows]
        names = [f"A = {key}" if key != "past" else f"Full ({audits[0]['past']:,})" for key in rows]
        image = heat(figure, left, values, names, [])
        left.set_xlabel(f"{len(values[0])} coordinates of {audits[0]['coordinates']['tensor']}", fontsize=7)
        figure.colorbar(image, ax=left, label="mean coefficient", location="top", shrink=0.5)
    else:
        empty(left)
    drawn = _agreements(right, audits)
    legend(figure)
    updates = f"the same {audits[0]['updates']:,} proposed updates" if audits else "the same proposed updates"
    caption = (
        f"Left: CPLUS's update-weighted mean mask over {updates}, at the coordinates with the most update energy, in "
        "one order in every row (first seed). Right: agreement with each method's own full-data mask; 1 is identical. "
        f"Error bars are standard errors, {counted(drawn)}."
    )
    return Picture(label="fig:mask-analysis-coordinates", paper="Fig. 15", caption=caption, figure=figure)


def _layers(audits: Sequence[dict[str, Any]], kind: str) -> tuple[list[str], list[list[float]]]:
    """Agreement by layer and budget, the mean over the seeds; a layer that nothing moves in agrees with nothing."""
    names = [layer["layer"] for layer in audits[0]["layers"]]
    values = []
    for place in range(len(names)):
        rows = [audit["layers"][place][kind] for audit in audits]
        values.append([_mean([row[i] for row in rows]) for i in range(len(rows[0]))])
    return names, values


def _mean(values: Sequence[float | None]) -> float:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else float("nan")


def _layer_panel(figure: Any, axis: Any, audits: Sequence[dict[str, Any]], kind: str) -> Any:
    axis.set(title=KINDS[kind], xlabel="anchors A (rows)", ylabel="layer")
    if not audits:
        empty(axis)
        return None
    names, values = _layers(audits, kind)
    return heat(figure, axis, values, names, [str(budget) for budget in audits[0]["budgets"]])


def fig_mask_agreement_all_layers(found: Collected) -> Picture:
    """Each method's agreement with its own full-data mask by layer and budget.

    Paper: Fig. 17.
    """
    audits = _audits(found)
    height = max(2.8, 0.2 * len(audits[0]["layers"]) + 1.0) if audits else 2.8
    figure, axes = sheet(2, width=4.2, height=height)
    images = [_layer_panel(figure, axis, audits, kind) for axis, kind in zip(axes, ("cpl", "cplus"), strict=True)]
    if images[-1] is not None:
        figure.colorbar(images[-1], ax=axes, label="agreement")
    caption = (
        f"Update-weighted agreement by layer and number of anchors; one colour scale from 0 to 1. Mean over the seeds, "
        f"n = {len(audits)}."
        if audits
        else "Not run."
    )
    return Picture(label="fig:mask-agreement-all-layers", paper="Fig. 17", caption=caption, figure=figure)


def fig_mask_cross_reference(found: Collected) -> Picture:
    """CPLUS's agreement with the full-data mask of CPL, in one layer and in all.

    Paper: Fig. 18.
    """
    audits = _audits(found)
    height = max(2.8, 0.2 * len(audits[0]["layers"]) + 1.0) if audits else 2.8
    figure, (left, right) = sheet(2, width=4.2, height=height)
    layer, points = _registered(audits)
    line(left, points, "CPLUS with full-data CPL", "#0072B2", "o")
    budgets(left, audits[0]["budgets"] if audits else ())
    left.set(title=f"(a) {layer}", ylabel="agreement", ylim=(0.0, 1.0))
    if not points:
        empty(left)
    image = _layer_panel(figure, right, audits, "cross")
    right.set_title("(b) all layers")
    if image is not None:
        figure.colorbar(image, ax=right, label="agreement")
    caption = (
        f"CPLUS's masks against the mask that CPL makes of all past rows, a reference it does not aim at. (a) The "
        f"layer of the recorded coordinates, with standard errors. (b) All layers, means. "
        f"{counted(e for _, e in points)}."
    )
    return Picture(label="fig:mask-cross-reference", paper="Fig. 18", caption=caption, figure=figure)


def _registered(audits: Sequence[dict[str, Any]]) -> tuple[str, Points]:
    """The layer that holds the recorded coordinates, and CPLUS's agreement with full-data CPL there."""
    if not audits:
        return "not run", []
    tensor = audits[0]["coordinates"]["tensor"]
    place = next(i for i, layer in enumerate(audits[0]["layers"]) if layer["layer"].split()[-1] in tensor.split("."))
    own, counts = [audit["layers"][place] for audit in audits], audits[0]["budgets"]
    values = [[layer["cross"][i] for layer in own if layer["cross"][i] is not None] for i in range(len(counts))]
    return own[0]["layer"], [(a, estimate(found)) for a, found in zip(counts, values, strict=True) if found]
