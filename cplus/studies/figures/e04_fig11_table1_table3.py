"""E4, components and settings: hyperparameters (Fig. 11), components (Table 1), reduction and smoothing (Table 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cplus.evaluation.statistics import Estimate
from cplus.experiment.record import RunResult
from cplus.studies.collected import Collected
from cplus.studies.e04 import BUDGETS, WEIGHTS
from cplus.studies.figures.drawing import (
    PALETTE,
    Picture,
    budget_axis,
    line,
    lines,
    mark_not_run,
    panels,
    points_by,
    seed_count,
)
from cplus.studies.figures.tables import ComparisonLine, Table, compare_methods, published_numbers, rows_by_method
from cplus.studies.summaries import learned, over_seeds, pick, retained


def fig_hyperparameters(found: Collected) -> Picture:
    """Retention by generation, by the weight of the anchors and by smoothing.

    Paper: Fig. 11.
    """
    runs = found.studies["e04"].runs
    few = min(found.scale.budgets)
    figure, (left, middle, right) = panels(3, width=3.2, height=2.7)
    drawn = _generation(left, pick(runs, method="cplus", anchor_weight=0.5, beta=0.9, num_anchors=few))
    left.set_title(f"generation, A = {few}")
    drawn += _weights(middle, pick(runs, beta=0.9, shots=2, temperature=0.8))
    budget_axis(middle, (a for a in BUDGETS if a in found.scale.budgets))
    middle.set_title("weight of the anchors")
    drawn += _betas(right, pick(runs, num_anchors=found.scale.anchors, anchor_weight=0.5))
    right.set(title=f"smoothing, A = {found.scale.anchors}", xlabel="beta of the mask's average")
    for axis in (left, middle, right):
        axis.set_ylabel("Retention (%)")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    caption = (
        f"Left: probes generated with so many examples in context at each temperature. Middle: weight of the anchors' "
        f"gradient in the blend; 0 is probes alone. Right: smoothing of the mask; 0 is the binary mask. Means and "
        f"standard errors, {seed_count(drawn)}."
    )
    return Picture(label="fig:hyperparameters", paper="Fig. 11", caption=caption, figure=figure)


def _generation(axis: Any, here: Sequence[RunResult]) -> list[Estimate]:
    drawn = []
    for colour, marker, shots in zip(PALETTE, "os", sorted({result.spec.shots for result in here}), strict=False):
        points = points_by(pick(here, shots=shots), "temperature")
        line(axis, points, f"{shots} examples", colour, marker)
        drawn += [found for _, found in points]
    axis.set_xlabel("sampling temperature")
    if not drawn:
        mark_not_run(axis)
    return drawn


def _weights(axis: Any, here: Sequence[RunResult]) -> list[Estimate]:
    drawn = []
    for colour, marker, weight in zip(PALETTE, "v^os", WEIGHTS, strict=False):
        alone = weight == 0
        own = pick(here, method="cplus-probes") if alone else pick(here, method="cplus", anchor_weight=weight)
        points = [(x, found) for x, found in points_by(own, "num_anchors") if x in BUDGETS]
        line(axis, points, "probes alone" if alone else f"anchors {weight:g}", colour, marker)
        drawn += [found for _, found in points]
    if not drawn:
        mark_not_run(axis)
    return drawn


def _betas(axis: Any, here: Sequence[RunResult]) -> list[Estimate]:
    binary = over_seeds(pick(here, method="cplus-no-ema"), retained)
    smooth = points_by(pick(here, method="cplus", shots=2, temperature=0.8), "beta")
    points = [*([(0.0, binary)] if binary else []), *smooth]
    lines(axis, {"cplus": [(float(x), found) for x, (_, found) in enumerate(points)]})
    axis.set_xticks(range(len(points)), [f"{beta:g}" for beta, _ in points])
    return [found for _, found in points]


def tab_cplus_ablation(found: Collected) -> Table:
    """Retention with each component left out.

    Paper: Table 1.
    """
    names = {
        "cplus-anchors": ("Anchor gradient only",),
        "cplus-probes": ("Probe gradient only",),
        "cplus-no-ema": ("CPLUS without EMA",),
        "cplus": ("CPLUS",),
        "cplus-norm-aligned": ("CPLUS + norm alignment",),
        "cplus-gradient": ("mask on the gradient (added here)",),
    }
    paper = {method: (published_numbers("e04").get(method), None) for method in names}
    rows, drawn = rows_by_method(_at_default_settings(found), names, (retained, learned), paper)
    return Table(
        label="tab:cplus-ablation",
        paper="Table 1",
        caption=f"Component ablation at A = {found.scale.anchors}, {seed_count(drawn)}. Published: one seed.",
        columns=("Variant", "Retention (%)", "Acquisition (%)"),
        rows=rows,
    )


def tab_ema_selection(found: Collected) -> Table:
    """Mean and tail reduction, with and without smoothing.

    Paper: Table 3.
    """
    names = {"cplus-no-ema": ("Mean", "None"), "cplus": ("Mean", "0.9"), "cplus-cvar": ("CVaR", "0.9")}
    paper = {method: (published_numbers("e04", 1)[method], 100.0) for method in names}
    own = pick(found.studies["e04"].runs, num_anchors=64, anchor_weight=0.5, beta=0.9)
    rows, drawn = rows_by_method(own, names, (retained, learned), paper)
    return Table(
        label="tab:ema-selection",
        paper="Table 3",
        caption=f"Reference reduction and mask smoothing at A = 64, {seed_count(drawn)}. Published: three runs.",
        columns=("Reduction", "EMA", "Retention (%)", "Acquisition (%)"),
        rows=rows,
    )


def _at_default_settings(found: Collected) -> list[RunResult]:
    """The runs of the component ablation: one budget, default blend, smoothing and generation."""
    runs, anchors = found.studies["e04"].runs, found.scale.anchors
    return pick(runs, num_anchors=anchors, anchor_weight=0.5, beta=0.9, shots=2, temperature=0.8)


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention by source and by kind of mask, with the paper's."""
    lines_of = {
        "Retention, anchors alone / probes alone / both (%)": ("cplus-anchors", "cplus-probes", "cplus"),
        "Retention, binary mask / smoothed / norm-aligned (%)": ("cplus-no-ema", "cplus", "cplus-norm-aligned"),
    }
    here, paper = _at_default_settings(found), published_numbers("e04")
    return [compare_methods(what, here, methods, paper) for what, methods in lines_of.items()]


FIGURES = (fig_hyperparameters,)
TABLES = (tab_cplus_ablation, tab_ema_selection)
