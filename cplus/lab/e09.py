"""E9: does the location of an update matter beyond its size and the mask's density?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from cplus.evaluation.statistics import estimate
from cplus.lab import drawing, summaries
from cplus.lab.records import RunResult
from cplus.lab.scales import Scale
from cplus.lab.study import Collected, ComparisonLine, Picture, Published, Summary, Table
from cplus.lab.summaries import KEPT_AND_LEARNED, Metric, learned, over_seeds, pick, retained, shown, table
from cplus.training.settings import RunSpec

TITLE = "Matched controls and mask geometry"
QUESTION = "Does update location matter beyond update magnitude or mask density?"
PAPER = "Table 6; Fig. 13; App. E.6, E.7"
TABLE_6 = Published(
    "Table 6 and App. E.7, Retention at 100 % Acquisition, A=8, seed 0",
    {"norm-matched": 45.45, "shuffled": 47.13, "cplus": 71.05, "cpl": 50.48},
)

CONTROLS = ("norm-matched", "shuffled")
TAPS = ("admission", "reference", "geometry")


def runs(scale: Scale) -> list[RunSpec]:
    """CPLUS, CPL and the two controls; CPL and CPLUS once more with diagnostics of their masks."""
    few, seeds = range(min(scale.seeds_where_one, 3)), range(scale.seeds_where_five)
    return [
        *scale.each({"method": (*CONTROLS, "cpl", "cplus"), "seed": seeds}),
        *scale.each({"method": ("cpl", "cplus"), "seed": few}, external=(), diagnose=TAPS),
    ]


def mean_over_epochs(entry: str, *path: str) -> Metric:
    """One number of a diagnostic, mean over the epochs."""

    def metric(result: RunResult) -> float | None:
        values: list[Any] = list(result.diagnostics.get(entry, {}).get("epochs", ()))
        for step in path:
            values = [value[step] for value in values]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

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


def summary(results: Sequence[RunResult]) -> Summary:
    """Retention of CPLUS and its controls; what the masks of CPL and CPLUS admit."""
    mine = pick(results, diagnose=())
    observed = [result for result in results if result.spec.diagnose]
    ours, (cpl, cplus) = pick(mine, method="cplus"), (pick(observed, method=method) for method in ("cpl", "cplus"))
    admits = "in the first states CPL's mask admits more {} than CPLUS's, in percent"
    claims = (
        *summaries.leads("CPLUS keeps more than {}", mine, CONTROLS, paper="Sec. 4.4; Table 6"),
        *(
            summaries.above(admits.format(words), cpl, cplus, early(kind), paper="App. E.7; Fig. 13")
            for kind, words in (("coordinates", "coordinates"), ("energy", "update energy"))
        ),
    )
    lost = {name: shown(summaries.margin(ours, pick(mine, method=name)), sign=True) for name in CONTROLS}
    harm = [over_seeds(own, GEOMETRY["harmful admitted"]) for own in (cpl, cplus)]
    shares = [f"{100 * found.mean:.0f} %" if found else "not run" for found in harm]
    answer = (
        f"CPLUS keeps {lost['norm-matched']} points more than an update of the same size without its mask and "
        f"{lost['shuffled']} more than its own coefficients in other places; of the update mass harmful to all past "
        f"rows CPL admits {shares[0]} and CPLUS {shares[1]}."
    )
    rows = (*table(mine, ("method",), KEPT_AND_LEARNED), *table(observed, ("method",), GEOMETRY))
    return Summary(rows=rows, answer=answer, claims=claims)


# E9, matched controls and mask geometry: what the masks admit (Fig. 13), controls of CPLUS (Table 6).


def fig_gradient_source_dynamics(found: Collected) -> Picture:
    """The shares of coordinates and of update energy that the instantaneous masks admit, over training.

    Paper: Fig. 13.
    """
    observed = pick(found.studies["e09"].results, diagnose=TAPS)
    figure, axes = drawing.panels(2, width=3.8, height=2.7, share=True, ylabel="share admitted")
    for axis, kind in zip(axes, ("coordinates", "energy"), strict=True):
        for method in ("cpl", "cplus"):
            states = [state for run in pick(observed, method=method) for state in run.diagnostics["geometry"]]
            epochs = sorted(summaries.grouped(states, lambda state: state["completed_epochs"]).items())
            points = [(epoch, estimate([state["mask"][kind] for state in own])) for epoch, own in epochs]
            drawing.lines(axis, {method: points})
        axis.locator_params(axis="x", integer=True)
        axis.set(title=f"admitted {kind}", xlabel="epochs completed")
    caption = (
        "What the masks admit of the proposed updates before smoothing, at a few states of training. Left: share of "
        "coordinates. Right: share of squared update size."
    )
    return drawing.picture(figure, "fig:gradient-source-dynamics", "Fig. 13", caption)


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
    paper = {method: (TABLE_6.numbers[method], 100.0) for method in names}
    own = pick(found.studies["e09"].results, diagnose=())
    rows = drawing.rows_by_method(own, names, (retained, learned), paper)
    columns = ("Method", "Matched property", "Retention (%)", "Acquisition (%)")
    caption = f"Matched update controls at A = {found.scale.anchors}"
    return drawing.measured_table(
        "tab:matched-update-controls", "Table 6", columns, rows, caption, "Published: seed 0."
    )


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention of CPLUS, CPL and the two controls, with the paper's."""
    methods = ("norm-matched", "shuffled", "cpl", "cplus")
    own, what = pick(found.studies["e09"].results, diagnose=()), f"Retention, {drawing.joined_names(methods)} (%)"
    return [drawing.compare_methods(what, own, methods, TABLE_6.numbers)]
