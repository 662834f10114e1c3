"""E9: does the location of an update matter beyond its size and the mask's density?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cplus.experiment.record import RunResult
from cplus.experiment.settings import RunSpec
from cplus.studies.scales import Scale
from cplus.studies.study import Published, Result, Study, Summary
from cplus.studies.summaries import (
    Metric,
    above,
    free_text,
    margin,
    over_seeds,
    pick,
    retention_measure,
    run_results,
    shown,
    table,
)

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
        *(
            above(f"CPLUS {kept.better_than} {name}", ours, pick(mine, method=name), kept.metric, paper=paper)
            for name in CONTROLS
        ),
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


STUDY = Study(
    name="e09",
    title="Matched controls and mask geometry",
    question="Does update location matter beyond update magnitude or mask density?",
    paper="Table 6; Fig. 13; App. E.6, E.7",
    runs=runs,
    summary=summary,
    published=(
        Published(
            where="Table 6 and App. E.7, Retention at 100 % Acquisition, A=8, seed 0",
            numbers={"norm-matched": 45.45, "shuffled": 47.13, "cplus": 71.05, "cpl": 50.48},
        ),
    ),
)
