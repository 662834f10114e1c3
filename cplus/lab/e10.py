"""E10: how does the learned mask relate to full-data and layer-wise references?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cplus.evaluation.statistics import estimate
from cplus.lab.drawing import budget_axis, by_budget, heat_map, joined, line, lines, panels, picture, seed_count
from cplus.lab.records import RunResult
from cplus.lab.scales import Scale
from cplus.lab.study import Claim, Collected, ComparisonLine, Picture, Published, Summary, SummaryRow
from cplus.lab.summaries import KEPT_AND_LEARNED, Seed, above, difference, grouped, mean_of, pick, shown, table
from cplus.training.settings import RunSpec

TITLE = "Mask references and layers"
QUESTION = "How does the learned mask relate to full-data and layer-wise references?"
PAPER = "Figs. 14, 15, 17, 18; App. E.8, E.11"
APP_E_8 = Published(
    "App. E.8, update-weighted agreement with the own full-data mask at A=128", {"cpl": 0.95, "cplus": 0.89}
)

KINDS = {"cpl": "CPL with full-data CPL", "cplus": "CPLUS with full-data CPLUS", "cross": "CPLUS with full-data CPL"}


def runs(scale: Scale) -> list[RunSpec]:
    """One audit per seed, over all budgets and layers; the Retention is from E1's runs."""
    first = scale.grid[0]
    axes = {"num_anchors": first.budgets, "method": ("cpl", "cplus"), "seed": range(scale.seeds_where_five)}
    audits = scale.each({"seed": range(scale.seeds_where_one)}, external=(), diagnose=("audit", "coordinates"))
    return audits + scale.each(axes, **first.place)


def summary(results: Sequence[RunResult]) -> Summary:
    """Update-weighted agreement by budget and layer, and Retention."""
    audits = {run.spec.seed: run.diagnostics["audit"] for run in results if "audit" in run.diagnostics}
    plain = pick(results, diagnose=())
    agrees: dict[str, dict[Seed, float]] = {k: {s: _percent(a[k]) for s, a in audits.items()} for k in KINDS}
    kept, energy = {m: pick(plain, method=m) for m in ("cpl", "cplus")}, difference(agrees["cpl"], agrees["cplus"])
    words = "CPL agrees more with its full-data mask than CPLUS with its own, in percent of update energy"
    nevertheless = "nevertheless CPLUS keeps more than CPL, mean over budgets"
    claims = [
        Claim(words, energy, "App. E.8; Fig. 14"),
        above(nevertheless, kept["cplus"], kept["cpl"], paper="App. E.8; Fig. 14"),
    ]
    for kind, name in (("cpl", "CPL"), ("cplus", "CPLUS")):
        words = f"{name} agrees more with its full-data mask at the most anchors than at the fewest, in percent"
        more = {seed: _percent([audit[kind][-1]]) - _percent([audit[kind][0]]) for seed, audit in audits.items()}
        claims.append(Claim(words, mean_of(more), "App. E.11; Fig. 17"))
    means = {kind: shown(mean_of(own)) for kind, own in agrees.items()}
    answer = (
        f"Over all budgets CPL's mask agrees with its full-data mask on {means['cpl']} % of the update energy "
        f"and CPLUS's with its own on {means['cplus']} %, a difference of {shown(energy, sign=True)} "
        f"points; CPLUS's agrees with full-data CPL's on {means['cross']} %."
    )
    rows = (*_rows(list(audits.values())), *table(plain, ("method", "num_anchors"), KEPT_AND_LEARNED))
    return Summary(rows=rows, answer=answer, claims=tuple(claims))


def _percent(values: Sequence[float | None]) -> float:
    return _mean([100.0 * value for value in values if value is not None])


def _mean(values: Sequence[float | None]) -> float:
    """NaN for a layer without updates."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else float("nan")


def _rows(audits: Sequence[dict[str, Any]]) -> list[SummaryRow]:
    """The agreements of each budget, then those of each layer."""
    budgets = audits[0]["budgets"] if audits else []
    by_budget = {b: [{kind: [audit[kind][i]] for kind in KINDS} for audit in audits] for i, b in enumerate(budgets)}
    by_layer = grouped((layer for audit in audits for layer in audit["layers"]), lambda layer: layer["layer"])
    rows = []
    for field, groups in (("num_anchors", by_budget), ("layer", by_layer)):
        for value, own in groups.items():
            figures = {words: estimate([_percent(one[kind]) for one in own]) for kind, words in KINDS.items()}
            rows.append(SummaryRow(at={field: value}, figures=figures))
    return rows


# E10, mask references and layers: agreement with the masks of all past rows (Figs. 14, 15, 17, 18).


def fig_mask_analysis(found: Collected) -> Picture:
    """Each method's agreement with its own full-data mask, and its Retention.

    Paper: Fig. 14.
    """
    figure, (left, right) = panels(2, width=3.8, height=2.8)
    _agreements(left, _audits(found))
    left.set_title("agreement")
    seeds = seed_count(figure.estimates)
    plain = pick(found.studies["e10"].results, diagnose=())
    lines(right, {method: by_budget(plain, method) for method in ("cpl", "cplus")})
    budget_axis(right, (result.spec.num_anchors for result in plain))
    right.set(title="Retention", ylabel="Retention (%)")
    caption = (
        "Left: update-weighted agreement of each method's mask with that of all past rows, over the same proposals at "
        f"fixed weights, {seeds}. Right: Retention of the runs of E1 at the same budgets. Error bars are "
        "standard errors."
    )
    return picture(figure, "fig:mask-analysis", "Fig. 14", caption, "")


def fig_mask_analysis_coordinates(found: Collected) -> Picture:
    """CPLUS's mean mask at 512 coordinates by budget, and each method's agreement.

    Paper: Fig. 15.
    """
    audits = _audits(found)
    figure, (left, right) = panels(2, width=4.6, height=2.8)
    if audits:
        own = audits[0]["coordinates"]["cplus"]
        rows = [*sorted((key for key in own if key != "past"), key=int), "past"]
        values = [[float(value) for value in own[key].split()] for key in rows]
        names = [f"A = {key}" if key != "past" else f"Full ({audits[0]['past']:,})" for key in rows]
        image = heat_map(left, values, names, [])
        left.set_xlabel(f"{len(values[0])} coordinates of {audits[0]['coordinates']['tensor']}", fontsize=7)
        figure.colorbar(image, ax=left, label="mean coefficient", location="top", shrink=0.5)
    _agreements(right, audits)
    updates = f"the same {audits[0]['updates']:,} proposed updates" if audits else "the same proposed updates"
    caption = (
        f"Left: CPLUS's update-weighted mean mask over {updates}, at the coordinates with the most update energy, in "
        "one order in every row (first seed). Right: agreement with each method's own full-data mask; 1 is identical."
    )
    return picture(figure, "fig:mask-analysis-coordinates", "Fig. 15", caption, "Error bars are standard errors")


def _audits(found: Collected) -> list[dict[str, Any]]:
    return [r.diagnostics["audit"] for r in found.studies["e10"].results if "audit" in r.diagnostics]


def _agreements(axis: Any, audits: Sequence[dict[str, Any]]) -> None:
    """Each method's agreement by budget over the seeds."""
    budgets = audits[0]["budgets"] if audits else ()
    for kind in ("cpl", "cplus"):
        lines(axis, {kind: [(b, estimate([audit[kind][i] for audit in audits])) for i, b in enumerate(budgets)]})
    budget_axis(axis, budgets)
    axis.set_ylabel("agreement with own reference")


def fig_mask_agreement_all_layers(found: Collected) -> Picture:
    """Each method's agreement with its own full-data mask by layer and budget.

    Paper: Fig. 17.
    """
    audits = _audits(found)
    figure, axes = panels(2, width=4.2, height=_layers_height(audits))
    for axis, kind in zip(axes, ("cpl", "cplus"), strict=True):
        image = _layer_panel(axis, audits, kind)
    if audits:
        figure.colorbar(image, ax=axes, label="agreement")
    caption = (
        "Update-weighted agreement by layer and number of anchors; one colour scale from 0 to 1. Mean over the seeds, "
        f"n = {len(audits)}."
    )
    return picture(figure, "fig:mask-agreement-all-layers", "Fig. 17", caption, "")


def fig_mask_cross_reference(found: Collected) -> Picture:
    """CPLUS's agreement with the full-data mask of CPL, in one layer and in all.

    Paper: Fig. 18.
    """
    audits = _audits(found)
    figure, (left, right) = panels(2, width=4.2, height=_layers_height(audits))
    for audit in audits[:1]:
        tensor = audit["coordinates"]["tensor"].split(".")
        at = next(i for i, layer in enumerate(audit["layers"]) if layer["layer"].split()[-1] in tensor)
        own = zip(*(audit["layers"][at]["cross"] for audit in audits), strict=True)
        known = [[value for value in seeds if value is not None] for seeds in own]
        points = [(a, estimate(seeds)) for a, seeds in zip(audit["budgets"], known, strict=True) if seeds]
        line(left, points, None, "#0072B2", "o")
        budget_axis(left, audit["budgets"])
        left.set_title(f"(a) {audit['layers'][at]['layer']}")
    left.set(ylabel="agreement", ylim=(0.0, 1.0))
    image = _layer_panel(right, audits, "cross")
    right.set_title("(b) all layers")
    if audits:
        figure.colorbar(image, ax=right, label="agreement")
    caption = (
        "CPLUS's masks against the mask that CPL makes of all past rows, a reference it does not aim at. (a) The "
        "layer of the recorded coordinates, with standard errors. (b) All layers, means. "
        f"{seed_count(figure.estimates)}."
    )
    return picture(figure, "fig:mask-cross-reference", "Fig. 18", caption, "")


def _layers_height(audits: Sequence[dict[str, Any]]) -> float:
    return max([2.8, *(0.2 * len(audit["layers"]) + 1.0 for audit in audits)])


def _layer_panel(axis: Any, audits: Sequence[dict[str, Any]], kind: str) -> Any:
    """Agreement by layer and budget, the mean over the seeds."""
    axis.set(title=KINDS[kind], xlabel="anchors A (rows)", ylabel="layer")
    if not audits:
        return None
    names = [layer["layer"] for layer in audits[0]["layers"]]
    own = [zip(*(audit["layers"][layer][kind] for audit in audits), strict=True) for layer in range(len(names))]
    values = [[_mean(seeds) for seeds in budgets] for budgets in own]
    return heat_map(axis, values, names, [str(budget) for budget in audits[0]["budgets"]])


def comparison(found: Collected) -> list[ComparisonLine]:
    """The agreement at the largest budget, with the paper's."""
    rows = [r for r in found.studies["e10"].summary.rows if KINDS["cpl"] in r.figures and "num_anchors" in r.at]
    last = max(rows, key=lambda row: int(row.at["num_anchors"]), default=None)
    at = f"at A = {last.at['num_anchors']}" if last else "at the largest budget"
    over = f"over {max((audit['updates'] for audit in _audits(found)), default=0)} updates (the paper: 678)"
    what = f"agreement with the own full-data mask {at}, {over}, CPL / CPLUS (% of update energy)"
    measured = joined([last.figures[KINDS[kind]] if last else None for kind in ("cpl", "cplus")])
    return [ComparisonLine(what, measured, " / ".join(f"{100 * APP_E_8.numbers[k]:.0f}" for k in ("cpl", "cplus")))]
