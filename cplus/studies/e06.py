"""E6: how do Acquisition, Retention and cost evolve during adaptation?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.evaluation.statistics import Estimate, estimate
from cplus.experiment.record import RunResult
from cplus.experiment.settings import RunSpec
from cplus.studies.scales import Scale
from cplus.studies.study import Claim, Published, Result, Study, Summary, SummaryRow, judged
from cplus.studies.summaries import above, margin, over_seeds, pick, retained, run_results, seed_of, shown, table

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
    """Full Acquisition, lowest and final Retention by method; gain and cost relative to SFT by model and method."""
    curves = [result for result in run_results(results) if result.curve]
    ends = [result for result in run_results(results) if not result.curve]
    points = table(
        curves,
        ("method",),
        {"first full epoch": first_full, "lowest retention": lowest, "final retention": retained},
    )
    costs = tuple(row for model in dict.fromkeys(r.spec.model for r in ends) for row in _costs(pick(ends, model=model)))
    ours = pick(ends, method="cplus")
    claims = [
        above(
            f"with the small bank CPLUS keeps more than {name}",
            ours,
            pick(ends, method=name),
            paper="Sec. 4.6; Fig. 7",
        )
        for name in COMPARED
        if name != "cplus"
    ] + _dynamics(curves)
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
                says=f"from its full Acquisition on CPLUS is above {name} at every epoch",
                margin=least_lead(own["cplus"], own[name]),
                paper="Sec. 4.6; Figs. 8, 12",
            )
            for name in CURVES[:-1]
        ),
        above(
            "after the first epoch replay has kept more than sft",
            own["replay"],
            own["sft"],
            at_first,
            paper="Sec. 4.6; Fig. 8",
        ),
        above("at the end replay keeps more than sft", own["replay"], own["sft"], paper="Sec. 4.6; Fig. 8"),
        *(
            Claim(
                says=f"{name}: Retention rises again after full Acquisition",
                margin=over_seeds(own[name], recovered),
                paper="Sec. 4.6; App. E.3; Figs. 8, 12",
            )
            for name in CURVES
        ),
    ]


def at_first(result: RunResult) -> float:
    """Retention after the first epoch."""
    return result.curve[0]["retention"]


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
