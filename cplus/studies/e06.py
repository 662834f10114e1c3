"""E6: how do Acquisition, Retention and cost evolve during adaptation?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.evaluate.statistics import Estimate
from cplus.records import RunResult, RunSpec
from cplus.studies.scales import Scale
from cplus.studies.shape import above, by_seed, difference, judged, over_seeds, pick, retained, shown, single, table
from cplus.studies.study import Published, Result, Row, Study, Summary

CURVES = ("sft", "replay", "cpl", "cplus")
COMPARED = ("sft", "replay", "distillation", "ssr", "agem", "ogd", "cpl", "cplus")


def runs(scale: Scale) -> list[RunSpec]:
    """Four methods evaluated after every epoch; eight by cost, with a small bank, at every size of the family."""
    task = scale.base.task
    sizes = [place for place in scale.places if place.task == task][:3]
    return [
        *(scale.at(method=m, evaluate_every=1, external=(), seed=s) for m in CURVES for s in range(scale.one)),
        *(
            scale.at(model=place.model, lr=place.lr, method=method, num_probes=scale.half, seed=seed)
            for place in sizes
            for method in COMPARED
            for seed in range(scale.one)
        ),
    ]


def flops(result: RunResult) -> float:
    """FLOPs of training and of recurring preservation passes.

    Paper: App. E.12, 2PL a forward pass and 6PL a forward and backward pass.
    """
    return float(result.cost["training_flops"] + result.cost["preservation_flops"])


def first_full(result: RunResult) -> float | None:
    """The first epoch at full Acquisition; None if there is none."""
    return next((point["epoch"] for point in result.curve if point["acquisition"] >= 100.0), None)


def lowest(result: RunResult) -> float | None:
    """The lowest Retention of the curve."""
    return min((point["retention"] for point in result.curve), default=None)


def summary(results: Sequence[Result]) -> Summary:
    """Curves' turning points by method; gain over SFT and cost relative to SFT by model and method."""
    curves = [result for result in single(results) if result.curve]
    ends = [result for result in single(results) if not result.curve]
    points = table(
        curves,
        ("method",),
        {"first full epoch": first_full, "lowest retention": lowest, "final retention": retained},
    )
    costs = tuple(row for model in dict.fromkeys(r.spec.model for r in ends) for row in _costs(pick(ends, model=model)))
    ours = pick(ends, method="cplus")
    claims = tuple(
        above(f"with the small bank CPLUS keeps more than {name}", ours, pick(ends, method=name))
        for name in COMPARED
        if name != "cplus"
    )
    full = {name: over_seeds(pick(curves, method=name), first_full) for name in ("cpl", "cplus")}
    ratio = [row.figures["cost"].mean for row in costs if row.at["method"] == "cplus"]
    times = " / ".join(f"{value:.2f}" for value in ratio) or "not run"
    answer = (
        f"CPLUS first learns everything after {shown(full['cplus'])} epochs, CPL after {shown(full['cpl'])}; with the "
        f"small bank CPLUS costs {times} times SFT's FLOPs, and {judged(claims)}."
    )
    return Summary(rows=(*points, *costs), answer=answer, claims=claims)


def _costs(here: Sequence[RunResult]) -> list[Row]:
    plain, rows = pick(here, method="sft"), []
    if not plain:
        return []
    unit = flops(plain[0])
    for method in COMPARED:
        own = pick(here, method=method)
        gain = difference(by_seed(own, retained), by_seed(plain, retained))
        cost = over_seeds(own, lambda result: flops(result) / unit)
        if gain is not None and cost is not None:
            figures: dict[str, Estimate] = {"gain over SFT": gain, "cost": cost}
            rows.append(Row(at={"model": here[0].spec.model, "method": method}, figures=figures))
    return rows


STUDY = Study(
    name="e06",
    title="Dynamics and cost",
    question="How do Acquisition, Retention and computational cost evolve during adaptation?",
    paper="Sec. 4.6; Figs. 7, 8, 12; App. E.3, E.12",
    runs=runs,
    summary=summary,
    published=(
        Published(where="Sec. 4.6, first epoch at 100 % Acquisition", numbers={"cplus": 5, "replay": 5, "cpl": 10}),
    ),
)
