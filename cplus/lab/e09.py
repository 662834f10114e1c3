"""E9: does the location of an update matter beyond its size and the mask's density?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cplus.evaluation.statistics import Estimate, estimate
from cplus.lab.drawing import (
    Points,
    compare_methods,
    estimates_of,
    joined_names,
    legend,
    lines,
    panels,
    rows_by_method,
    seed_count,
)
from cplus.lab.records import Result, RunResult
from cplus.lab.scales import Scale
from cplus.lab.study import Collected, ComparisonLine, Picture, Published, Study, Summary, Table, run_results
from cplus.lab.summaries import (
    Metric,
    above,
    free_text,
    leads,
    learned,
    margin,
    over_seeds,
    pick,
    retained,
    retention_measure,
    shown,
    table,
)
from cplus.training.settings import RunSpec

CONTROLS = ("norm-matched", "shuffled")
TAPS = ("admission", "reference", "geometry")


def runs(scale: Scale) -> list[RunSpec]:
    """CPLUS, CPL and the two controls; CPL and CPLUS once more with diagnostics of their masks."""
    return [
        *(scale.at(method=m, seed=s) for m in (*CONTROLS, "cpl", "cplus") for s in range(scale.seeds_where_five)),
        *(
            scale.at(method=method, external=(), diagnose=TAPS, seed=seed)
            for method in ("cpl", "cplus")
            for seed in range(min(scale.seeds_where_one, 3))
        ),
    ]


def mean_over_epochs(entry: str, *path: str) -> Metric:
    """One number of a diagnostic, mean over the epochs."""

    def metric(result: RunResult) -> float | None:
        values: list[Any] = list(result.diagnostics.get(entry, {}).get("epochs", ()))
        for step in path:
            values = [value[step] for value in values]
        found = [float(value) for value in values if value is not None]
        return sum(found) / len(found) if found else None

    return metric


def early(kind: str) -> Metric:
    """The percentage that the instantaneous mask admits, mean over the states before 9 of 25 epochs.

    Paper: App. E.7, from nine completed epochs on the two methods admit about the same.
    """

    def metric(result: RunResult) -> float | None:
        states = result.diagnostics.get("geometry", ())
        first = [s["mask"][kind] for s in states if 25 * s["completed_epochs"] < 9 * result.spec.epochs]
        return 100.0 * sum(first) / len(first) if first else None

    return metric


GEOMETRY = {
    "admitted coordinates": mean_over_epochs("admission", "mask", "coordinates"),
    "admitted energy": mean_over_epochs("admission", "mask", "energy"),
    "applied energy": mean_over_epochs("admission", "coefficient", "energy"),
    "harmful admitted": mean_over_epochs("reference", "coefficient", "harmful_admitted_share"),
    "safe removed": mean_over_epochs("reference", "coefficient", "safe_removed_share"),
}


def summary(results: Sequence[Result]) -> Summary:
    """Retention of CPLUS and its controls (free text at matched learning); what the masks of CPL and CPLUS admit."""
    mine = [result for result in run_results(results) if not result.spec.diagnose]
    observed = [result for result in run_results(results) if result.spec.diagnose]
    kept = retention_measure(mine)
    ours = pick(mine, method="cplus")
    paper = None if free_text(mine) else "Sec. 4.4; Table 6"
    claims = (
        *leads(f"CPLUS {kept.better_than} {{}}", mine, CONTROLS, kept.metric, paper=paper),
        *(
            above(
                f"in the first states CPL's mask admits more {words} than CPLUS's, in percent",
                pick(observed, method="cpl"),
                pick(observed, method="cplus"),
                early(kind),
                paper="App. E.7; Fig. 13",
            )
            for kind, words in (("coordinates", "coordinates"), ("energy", "update energy"))
            if not free_text(mine)
        ),
    )
    lost = {name: shown(margin(ours, pick(mine, method=name), kept.metric), sign=True) for name in CONTROLS}
    harm = [over_seeds(pick(observed, method=name), GEOMETRY["harmful admitted"]) for name in ("cpl", "cplus")]
    shares = [f"{100 * found.mean:.0f} %" if found else "not run" for found in harm]
    answer = (
        f"CPLUS keeps {lost['norm-matched']} points more than an update of the same size without its mask and "
        f"{lost['shuffled']} more than its own coefficients in other places; of the update mass harmful to all past "
        f"rows CPL admits {shares[0]} and CPLUS {shares[1]}."
    )
    if free_text(mine):
        answer = (
            f"At matched learning of free text the past answers' loss rises by {lost['norm-matched']} "
            f"{kept.points_more} under CPLUS than under an update of the same size without its mask, and by "
            f"{lost['shuffled']} less than under its own coefficients in other places."
        )
    rows = (*table(mine, ("method",), kept.columns), *table(observed, ("method",), GEOMETRY))
    return Summary(rows=rows, answer=answer, claims=claims)


# E9, matched controls and mask geometry: what the masks admit (Fig. 13), controls of CPLUS (Table 6).


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
    paper = {method: (STUDY.published[0].numbers[method], 100.0) for method in names}
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
    return [compare_methods(what, _without_diagnostics(found), methods, STUDY.published[0].numbers)]


STUDY = Study(
    name="e09",
    title="Matched controls and mask geometry",
    question="Does update location matter beyond update magnitude or mask density?",
    paper="Table 6; Fig. 13; App. E.6, E.7",
    runs=runs,
    summary=summary,
    published=(
        Published(
            "Table 6 and App. E.7, Retention at 100 % Acquisition, A=8, seed 0",
            {"norm-matched": 45.45, "shuffled": 47.13, "cplus": 71.05, "cpl": 50.48},
        ),
    ),
    figures=(fig_gradient_source_dynamics,),
    tables=(tab_matched_update_controls,),
    comparison=comparison,
)
