"""The figures of E3, E4, E11 and E12: how probes are used, which settings matter, priors and rotating evidence."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from cplus.evaluation.statistics import Estimate
from cplus.experiment.record import RunResult
from cplus.plotting import OTHER
from cplus.studies import e03, e04, e11, e12
from cplus.studies.collected import Collected
from cplus.studies.figures.drawing import (
    PALETTE,
    Picture,
    Points,
    budgets,
    counted,
    empty,
    legend,
    line,
    lines,
    look,
    method_name,
    sheet,
)
from cplus.studies.figures.grid import by_budget
from cplus.studies.summaries import over_seeds, pick, retained, table


def fig_self_probe_role_anchor_scale(found: Collected) -> Picture:
    """The same probes as gradients and as replay, by budget.

    Paper: Fig. 5.
    """
    own = found.studies["e03"]
    figure, (axis,) = sheet(1, width=5.2, height=3.0)
    series = {method: by_budget(own.runs, method) for method in e03.METHODS}
    lines(axis, series)
    budgets(axis, (spec.num_anchors for spec in own.specs))
    axis.set_ylabel("Retention (%)")
    legend(figure)
    drawn = [estimate for points in series.values() for _, estimate in points]
    caption = (
        "Three uses of the same self-probes with the same number of updates: as gradients (CPLUS), as replay, and as "
        f"replay together with the anchors. Means and standard errors, {counted(drawn)}."
    )
    return Picture(label="fig:self-probe-role-anchor-scale", paper="Fig. 5", caption=caption, figure=figure)


def fig_hyperparameters(found: Collected) -> Picture:
    """Retention by generation, by the weight of the anchors and by smoothing.

    Paper: Fig. 11.
    """
    own = found.studies["e04"]
    few = min(found.scale.budgets)
    figure, (left, middle, right) = sheet(3, width=3.2, height=2.7)
    plain = pick(own.runs, method="cplus", anchor_weight=0.5, beta=0.9)
    drawn = _generation(left, pick(plain, num_anchors=few))
    left.set_title(f"generation, A = {few}")
    drawn += _weights(middle, pick(own.runs, beta=0.9, shots=2, temperature=0.8))
    budgets(middle, (a for a in e04.BUDGETS if a in found.scale.budgets))
    middle.set_title("weight of the anchors")
    drawn += _betas(right, pick(own.runs, num_anchors=found.scale.anchors, anchor_weight=0.5))
    right.set(title=f"smoothing, A = {found.scale.anchors}", xlabel="beta of the mask's average")
    for axis in (left, middle, right):
        axis.set_ylabel("Retention (%)")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    caption = (
        f"Left: probes generated with so many examples in context at each temperature. Middle: weight of the anchors' "
        f"gradient in the blend; 0 is probes alone. Right: smoothing of the mask; 0 is the binary mask. Means and "
        f"standard errors, {counted(drawn)}."
    )
    return Picture(label="fig:hyperparameters", paper="Fig. 11", caption=caption, figure=figure)


def _by(results: Sequence[RunResult], field: str) -> Points:
    rows = table(results, (field,), {"value": retained})
    return sorted((row.at[field], row.figures["value"]) for row in rows)


def _generation(axis: Any, here: Sequence[RunResult]) -> list[Estimate]:
    drawn = []
    for colour, marker, shots in zip(PALETTE, "os", sorted({result.spec.shots for result in here}), strict=False):
        points = _by(pick(here, shots=shots), "temperature")
        line(axis, points, f"{shots} examples", colour, marker)
        drawn += [estimate for _, estimate in points]
    axis.set_xlabel("sampling temperature")
    if not drawn:
        empty(axis)
    return drawn


def _weights(axis: Any, here: Sequence[RunResult]) -> list[Estimate]:
    drawn = []
    for colour, marker, weight in zip(PALETTE, "v^os", e04.WEIGHTS, strict=False):
        alone = weight == 0
        own = pick(here, method="cplus-probes") if alone else pick(here, method="cplus", anchor_weight=weight)
        points = [(x, e) for x, e in _by(own, "num_anchors") if x in e04.BUDGETS]
        line(axis, points, "probes alone" if alone else f"anchors {weight:g}", colour, marker)
        drawn += [estimate for _, estimate in points]
    if not drawn:
        empty(axis)
    return drawn


def _betas(axis: Any, here: Sequence[RunResult]) -> list[Estimate]:
    binary = over_seeds(pick(here, method="cplus-no-ema"), retained)
    smooth = _by(pick(here, method="cplus", shots=2, temperature=0.8), "beta")
    points = [*([(0.0, binary)] if binary else []), *smooth]
    lines(axis, {"cplus": [(float(x), found) for x, (_, found) in enumerate(points)]})
    axis.set_xticks(range(len(points)), [f"{beta:g}" for beta, _ in points])
    return [estimate for _, estimate in points]


def fig_answer_prior(found: Collected) -> Picture:
    """Retention as asked, averaged over answers, and with each answer's mean change of score taken off (E11)."""
    own = found.studies["e11"].runs
    figure, (axis,) = sheet(1, width=6.4, height=3.0)
    kinds = {"retention": "as asked", "macro": "averaged over answers", "corrected": "prior taken off"}
    drawn: list[Estimate] = []
    for number, (kind, name) in enumerate(kinds.items()):
        each = ((x, over_seeds(pick(own, method=m), e11.FIGURES[kind])) for x, m in enumerate(e11.METHODS))
        points = [(x + 0.18 * (number - 1), estimate) for x, estimate in each if estimate is not None]
        line(axis, points, name, PALETTE[number], "os^"[number], linestyle="none")
        drawn += [estimate for _, estimate in points]
    axis.set_xticks(range(len(e11.METHODS)), [method_name(method) for method in e11.METHODS])
    axis.set_ylabel("Retention (%)")
    if not drawn:
        empty(axis)
    legend(figure)
    caption = (
        "How much of forgetting is a moved prior over answers: Retention, the mean over answers of their Retention, "
        f"and Retention after each answer's mean change of score is taken off. Means and standard errors, "
        f"{counted(drawn)}."
    )
    return Picture(label="fig:answer-prior", paper="Added here", caption=caption, figure=figure)


def fig_rotating_evidence(found: Collected) -> Picture:
    """Retention of every use of a refresh budget, and its rows of evidence (E12)."""
    groups: dict[str, list[RunResult]] = {}
    for result in found.studies["e12"].runs:
        groups.setdefault(e12.name(result), []).append(result)
    means = {name: (over_seeds(own, retained), over_seeds(own, e12.cost)) for name, own in groups.items()}
    order = sorted(groups, key=lambda name: statistics.fmean(result.retention for result in groups[name]))
    figure, (axis,) = sheet(1, width=7.0, height=max(2.6, 0.3 * len(order) + 0.8))
    axis.grid(visible=True, axis="x")
    base = f"all {found.scale.base.num_probes} every epoch"
    for y, name in enumerate(order):
        kept, rows = means[name]
        if kept is not None and rows is not None:
            colour = look("cplus")[0] if name == base else OTHER
            axis.errorbar([kept.mean], [y], xerr=[kept.error or 0.0], color=colour, marker="o", capsize=2)
            axis.annotate(
                f"{rows.mean:,.0f} rows", (1.0, y), xycoords=("axes fraction", "data"), va="center", fontsize=7
            )
    axis.set_yticks(range(len(order)), order)
    axis.set_xlabel("Retention (%)")
    if not order:
        empty(axis)
    drawn = [kept for kept, _ in means.values()]
    caption = (
        "Uses of evidence by Retention, with the rows of evidence of a whole run at the right; the dark point is the "
        f"fixed bank. Means and standard errors, {counted(drawn)}."
    )
    return Picture(label="fig:rotating-evidence", paper="Added here", caption=caption, figure=figure)
