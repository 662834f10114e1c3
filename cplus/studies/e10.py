"""E10: how does the learned mask relate to full-data and layer-wise references?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cplus.evaluation.statistics import estimate
from cplus.experiment.record import RunResult
from cplus.experiment.settings import RunSpec
from cplus.studies.scales import Scale
from cplus.studies.study import Claim, Published, Result, Study, Summary, SummaryRow
from cplus.studies.summaries import KEPT_AND_LEARNED, Seed, above, difference, pick, run_results, shown, table

KINDS = {"cpl": "CPL with full-data CPL", "cplus": "CPLUS with full-data CPLUS", "cross": "CPLUS with full-data CPL"}


def runs(scale: Scale) -> list[RunSpec]:
    """One audit per seed, over all budgets and layers; the Retention is from E1's runs."""
    first = scale.grid[0]
    return [
        *(scale.at(external=(), diagnose=("audit", "coordinates"), seed=seed) for seed in range(scale.seeds_where_one)),
        *(
            scale.at(model=first.model, task=first.task, lr=first.lr, method=method, num_anchors=budget, seed=seed)
            for budget in first.budgets
            for method in ("cpl", "cplus")
            for seed in range(scale.seeds_where_five)
        ),
    ]


def summary(results: Sequence[Result]) -> Summary:
    """Update-weighted agreement by budget and layer, and Retention."""
    audits = [result for result in run_results(results) if "audit" in result.diagnostics]
    plain = [result for result in run_results(results) if not result.spec.diagnose]
    rows = (*_by_budget(audits), *_by_layer(audits), *table(plain, ("method", "num_anchors"), KEPT_AND_LEARNED))
    agrees: dict[str, dict[Seed, float]] = {
        kind: {a.spec.seed: _mean(a.diagnostics["audit"][kind]) for a in audits} for kind in KINDS
    }
    claims = (
        Claim(
            says="CPL agrees more with its full-data mask than CPLUS with its own, in percent of update energy",
            margin=difference(agrees["cpl"], agrees["cplus"]),
            paper="App. E.8; Fig. 14",
        ),
        above(
            "nevertheless CPLUS keeps more than CPL, mean over budgets",
            pick(plain, method="cplus"),
            pick(plain, method="cpl"),
            paper="App. E.8; Fig. 14",
        ),
        *(
            Claim(
                says=f"{name} agrees more with its full-data mask at the most anchors than at the fewest, in percent",
                margin=difference(_at(audits, kind, -1), _at(audits, kind, 0)),
                paper="App. E.11; Fig. 17",
            )
            for kind, name in (("cpl", "CPL"), ("cplus", "CPLUS"))
        ),
    )
    means = {kind: estimate(list(own.values())) if own else None for kind, own in agrees.items()}
    answer = (
        f"Over all budgets CPL's mask agrees with its full-data mask on {shown(means['cpl'])} % of the update energy "
        f"and CPLUS's with its own on {shown(means['cplus'])} %, a difference of {shown(claims[0].margin, sign=True)} "
        f"points; CPLUS's agrees with full-data CPL's on {shown(means['cross'])} %."
    )
    return Summary(rows=rows, answer=answer, claims=claims)


def _mean(values: Sequence[float | None]) -> float:
    found = [100.0 * value for value in values if value is not None]
    return sum(found) / len(found)


def _at(audits: Sequence[RunResult], kind: str, index: int) -> dict[Seed, float]:
    """Each seed's agreement at one of the budgets."""
    return {result.spec.seed: _mean([result.diagnostics["audit"][kind][index]]) for result in audits}


def _by_budget(audits: Sequence[RunResult]) -> list[SummaryRow]:
    budgets = list(dict.fromkeys(b for result in audits for b in result.diagnostics["audit"]["budgets"]))
    rows = []
    for index, budget in enumerate(budgets):
        own = [result.diagnostics["audit"] for result in audits]
        figures = {KINDS[kind]: estimate([_mean([found[kind][index]]) for found in own]) for kind in KINDS}
        rows.append(SummaryRow(at={"num_anchors": budget}, figures=figures))
    return rows


def _by_layer(audits: Sequence[RunResult]) -> list[SummaryRow]:
    layers: dict[str, list[dict[str, Any]]] = {}
    for result in audits:
        for layer in result.diagnostics["audit"]["layers"]:
            layers.setdefault(layer["layer"], []).append(layer)
    return [
        SummaryRow(
            at={"layer": name}, figures={KINDS[kind]: estimate([_mean(one[kind]) for one in own]) for kind in KINDS}
        )
        for name, own in layers.items()
    ]


STUDY = Study(
    name="e10",
    title="Mask references and layers",
    question="How does the learned mask relate to full-data and layer-wise references?",
    paper="Figs. 14, 15, 17, 18; App. E.8, E.11",
    runs=runs,
    summary=summary,
    published=(
        Published(
            where="App. E.8, update-weighted agreement with the own full-data mask at A=128",
            numbers={"cpl": 0.95, "cplus": 0.89},
        ),
    ),
)
