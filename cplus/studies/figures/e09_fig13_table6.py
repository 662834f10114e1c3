"""E9, matched controls and mask geometry: what the masks admit (Fig. 13), controls of CPLUS (Table 6)."""

from __future__ import annotations

from collections.abc import Sequence

from cplus.evaluation.statistics import Estimate, estimate
from cplus.experiment.record import RunResult
from cplus.studies.collected import Collected
from cplus.studies.figures.drawing import Picture, Points, estimates_of, legend, lines, panels, seed_count
from cplus.studies.figures.tables import (
    ComparisonLine,
    Table,
    compare_methods,
    joined_names,
    published_numbers,
    rows_by_method,
)
from cplus.studies.summaries import learned, pick, retained


def fig_gradient_source_dynamics(found: Collected) -> Picture:
    """The shares of coordinates and of update energy that the instantaneous masks admit, over training.

    Paper: Fig. 13.
    """
    observed = [result for result in found.studies["e09"].runs if "geometry" in result.diagnostics]
    figure, axes = panels(2, width=3.8, height=2.7, share=True)
    drawn: list[Estimate] = []
    for axis, kind in zip(axes, ("coordinates", "energy"), strict=True):
        series = {method: _admitted(pick(observed, method=method), kind) for method in ("cpl", "cplus")}
        lines(axis, series)
        axis.locator_params(axis="x", integer=True)
        axis.set(title=f"admitted {kind}", xlabel="epochs completed")
        drawn += estimates_of(series)
    axes[0].set_ylabel("share admitted")
    legend(figure)
    caption = (
        "What the masks admit of the proposed updates before smoothing, at a few states of training. Left: share of "
        f"coordinates. Right: share of squared update size. Means and standard errors, {seed_count(drawn)}."
    )
    return Picture(label="fig:gradient-source-dynamics", paper="Fig. 13", caption=caption, figure=figure)


def _admitted(results: Sequence[RunResult], kind: str) -> Points:
    states: dict[float, list[float]] = {}
    for result in results:
        for state in result.diagnostics["geometry"]:
            states.setdefault(state["completed_epochs"], []).append(state["mask"][kind])
    return [(epoch, estimate(values)) for epoch, values in sorted(states.items())]


def tab_matched_update_controls(found: Collected) -> Table:
    """CPLUS against updates of its size and masks of its density.

    Paper: Table 6.
    """
    names = {
        "norm-matched": ("Norm-matched SFT", "Applied update norm"),
        "shuffled": ("Randomized CPLUS mask", "Per-tensor mask coefficients"),
        "cplus": ("CPLUS", "Probe-informed coordinate placement"),
        "cpl": ("CPL", "none (App. E.7)"),
    }
    paper = {method: (published_numbers("e09")[method], 100.0) for method in names}
    rows, drawn = rows_by_method(_without_diagnostics(found), names, (retained, learned), paper)
    return Table(
        label="tab:matched-update-controls",
        paper="Table 6",
        caption=f"Matched update controls at A = {found.scale.anchors}, {seed_count(drawn)}. Published: seed 0.",
        columns=("Method", "Matched property", "Retention (%)", "Acquisition (%)"),
        rows=rows,
    )


def _without_diagnostics(found: Collected) -> list[RunResult]:
    return [result for result in found.studies["e09"].runs if not result.spec.diagnose]


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention of CPLUS, CPL and the two controls, with the paper's."""
    methods = ("norm-matched", "shuffled", "cpl", "cplus")
    what = f"Retention, {joined_names(methods)} (%)"
    return [compare_methods(what, _without_diagnostics(found), methods, published_numbers("e09"))]


FIGURES = (fig_gradient_source_dynamics,)
TABLES = (tab_matched_update_controls,)
