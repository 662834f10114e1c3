"""E4: which components and settings of CPLUS matter?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.lab import drawing
from cplus.lab.records import RunResult
from cplus.lab.scales import Scale
from cplus.lab.study import Claim, Collected, ComparisonLine, Picture, Published, Summary, Table
from cplus.lab.summaries import KEPT_AND_LEARNED, above, learned, margin, over_seeds, pick, retained, shown, table
from cplus.training.settings import RunSpec

TITLE = "Components and settings"
QUESTION = "Which CPLUS components and configurations matter?"
PAPER = "Sec. 4.4; Tables 1, 3; Fig. 11; App. E.2"
TABLE_1 = Published(
    "Table 1, Retention, Qwen3-0.6B, CSQA, A=8, one seed",
    {
        "cplus-anchors": 55.13,
        "cplus-probes": 71.49,
        "cplus-no-ema": 78.71,
        "cplus": 79.96,
        "cplus-norm-aligned": 79.94,
    },
)
TABLE_3 = Published(
    "Table 3, Retention and standard error, A=64, three runs",
    {"cplus-no-ema": (81.11, 2.95), "cplus": (82.32, 0.64), "cplus-cvar": (77.40, 0.28)},
)

COMPONENTS = ("cplus-anchors", "cplus-probes", "cplus-no-ema", "cplus", "cplus-norm-aligned", "cplus-gradient")
REDUCTIONS = ("cplus-no-ema", "cplus", "cplus-cvar")
WEIGHTS = (0.0, 0.25, 0.5, 0.75)
BETAS = (0.5, 0.9, 0.99)
BUDGETS = (4, 8, 16, 32)
FIG_11 = "App. E.2; Fig. 11"
FIELDS = ("method", "num_anchors", "anchor_weight", "beta", "shots", "temperature")


def runs(scale: Scale) -> list[RunSpec]:
    """Components at one budget; blend weights over budgets; generation at the smallest; reduction at a large one."""
    few, seeds, more = min(scale.budgets), range(scale.seeds_where_one), range(scale.seeds_where_three)
    budgets, large = ([a for a in some if a in scale.budgets] for some in (BUDGETS, (64,)))
    return [
        *scale.each({"method": COMPONENTS, "seed": more}),
        # With weight 0 it is the method of probes alone.
        *scale.each({"num_anchors": budgets, "seed": seeds}, method="cplus-probes"),
        *scale.each({"anchor_weight": WEIGHTS[1:], "num_anchors": budgets, "seed": seeds}),
        *scale.each({"method": ("cplus-probes", "cplus"), "num_anchors": budgets, "seed": more}),
        *scale.each({"seed": seeds}, method="cplus-no-ema"),
        *scale.each({"beta": BETAS, "seed": seeds}),
        *scale.each({"shots": scale.shots, "temperature": scale.temperatures, "seed": seeds}, num_anchors=few),
        *scale.each({"method": REDUCTIONS, "num_anchors": large, "seed": more}),
    ]


def summary(mine: Sequence[RunResult]) -> Summary:
    """Retention of every variant; CPLUS against each variant without a component and against each other setting."""
    budget = next((r.spec.num_anchors for r in mine if r.spec.method == "cplus-norm-aligned"), 8)
    here = pick(mine, num_anchors=budget, anchor_weight=0.5, beta=0.9, shots=2, temperature=0.8)
    whole = pick(here, method="cplus")
    many = pick(mine, num_anchors=64, anchor_weight=0.5, beta=0.9)
    smooth, claims = "smoothing keeps more than the binary mask", []
    for name, words, paper in (
        ("cplus-anchors", "both sources keep more than anchors alone", "Sec. 4.4; Table 1"),
        ("cplus-probes", "both sources keep more than probes alone", "Sec. 4.4; Table 1"),
        ("cplus-no-ema", smooth, "Sec. 4.4; Table 1"),
        ("cplus-gradient", "masking the update keeps more than masking the gradient", None),
    ):
        claims.append(above(words, whole, pick(here, method=name), paper=paper))
    claims += [*_blends(mine, budget), *_generation(mine)]
    for name, words in (("cplus-no-ema", smooth), ("cplus-cvar", "the mean keeps more than CVaR")) if many else ():
        other = pick(many, method=name)
        claims.append(above(f"{words}, A=64", pick(many, method="cplus"), other, paper="App. E.2; Table 3"))
    gains = {name: shown(margin(whole, pick(here, method=name)), sign=True) for name in COMPONENTS if name != "cplus"}
    answer = (
        f"At A={budget} both sources together keep {gains['cplus-anchors']} points more than anchors alone and "
        f"{gains['cplus-probes']} more than probes alone; smoothing adds {gains['cplus-no-ema']}, "
        f"and CPLUS minus its norm-aligned variant is {gains['cplus-norm-aligned']}."
    )
    return Summary(rows=table(mine, FIELDS, KEPT_AND_LEARNED), answer=answer, claims=tuple(claims))


def _blends(results: Sequence[RunResult], table_budget: int) -> list[Claim]:
    """Equal weights against probes alone and against unequal weights, budget by budget.

    The paper's 75:25 is read as probes to anchors: it is listed between probes alone and equal weights. The claim on
    probes alone at the budget of Table 1 belongs to that table.
    """
    mine = pick(results, num_anchors=BUDGETS, beta=0.9, shots=2, temperature=0.8)
    budgets = sorted({result.spec.num_anchors for result in pick(mine, method="cplus-probes")})
    claims, both = [], "both sources keep more than probes alone"
    for budget in budgets:
        here = pick(mine, num_anchors=budget)
        ours = pick(here, method="cplus", anchor_weight=0.5)
        if budget != table_budget:
            claims.append(above(f"{both}, A={budget}", ours, pick(here, method="cplus-probes"), paper=FIG_11))
        for weight, paper in ((0.25, FIG_11), (0.75, None)):
            words = f"equal weights keep more than {1 - weight:.0%} probes, A={budget}"
            claims.append(above(words, ours, pick(here, method="cplus", anchor_weight=weight), paper=paper))
    if budgets:
        equal, words = pick(mine, method="cplus", anchor_weight=0.5), ", ".join(map(str, budgets))
        probes = pick(mine, method="cplus-probes")
        claims.append(above(f"{both}, mean over A = {words}", pick(equal, num_anchors=tuple(budgets)), probes))
    return claims


def _generation(results: Sequence[RunResult]) -> list[Claim]:
    """Two examples in context at T = 0.8 against every other generation setting tried, at the fewest anchors."""
    mine = pick(results, method="cplus", anchor_weight=0.5, beta=0.9)
    few = min((result.spec.num_anchors for result in mine), default=0)
    tried = sorted({(r.spec.shots, r.spec.temperature) for r in mine} - {(2, 0.8)})
    chosen = pick(mine, num_anchors=few, shots=2, temperature=0.8)
    words = "2 examples in context at T=0.8 keep more than {} at T={:g}, A={}"
    others = {(s, t): pick(mine, num_anchors=few, shots=s, temperature=t) for s, t in tried}
    return [above(words.format(*at, few), chosen, own, paper=FIG_11) for at, own in others.items()]


# E4, components and settings: hyperparameters (Fig. 11), components (Table 1), reduction and smoothing (Table 3).


def fig_hyperparameters(found: Collected) -> Picture:
    """Retention by generation, by the weight of the anchors and by smoothing.

    Paper: Fig. 11.
    """
    runs, few = found.studies["e04"].results, min(found.scale.budgets)
    figure, (left, middle, right) = drawing.panels(3, width=3.2, height=2.7)
    here = pick(runs, method="cplus", anchor_weight=0.5, beta=0.9, num_anchors=few)
    for colour, marker, shots in zip(drawing.PALETTE, "os", sorted({run.spec.shots for run in here}), strict=False):
        points = drawing.points_by(pick(here, shots=shots), "temperature")
        drawing.line(left, points, f"{shots} examples", colour, marker)
    left.set(title=f"generation, A = {few}", xlabel="sampling temperature")
    here = pick(runs, beta=0.9, shots=2, temperature=0.8, num_anchors=BUDGETS)
    for colour, marker, weight in zip(drawing.PALETTE, "v^os", WEIGHTS, strict=False):
        own = pick(here, method="cplus", anchor_weight=weight) if weight else pick(here, method="cplus-probes")
        name = f"anchors {weight:g}" if weight else "probes alone"
        drawing.line(middle, drawing.points_by(own, "num_anchors"), name, colour, marker)
    drawing.budget_axis(middle, (a for a in BUDGETS if a in found.scale.budgets))
    middle.set_title("weight of the anchors")
    here = pick(runs, num_anchors=found.scale.anchors, anchor_weight=0.5)
    binary = over_seeds(pick(here, method="cplus-no-ema"), retained)
    smooth = drawing.points_by(pick(here, method="cplus", shots=2, temperature=0.8), "beta")
    points = [*([(0.0, binary)] if binary else []), *smooth]
    drawing.lines(right, {"cplus": [(float(x), value) for x, (_, value) in enumerate(points)]})
    right.set_xticks(range(len(points)), [f"{beta:g}" for beta, _ in points])
    right.set(title=f"smoothing, A = {found.scale.anchors}", xlabel="beta of the mask's average")
    for axis in (left, middle, right):
        axis.set_ylabel("Retention (%)")
        if axis.has_data():
            axis.legend(fontsize=7)
    caption = (
        "Left: probes generated with so many examples in context at each temperature. Middle: weight of the anchors' "
        "gradient in the blend; 0 is probes alone. Right: smoothing of the mask; 0 is the binary mask."
    )
    return drawing.picture(figure, "fig:hyperparameters", "Fig. 11", caption)


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
    paper = {method: (TABLE_1.numbers.get(method), None) for method in names}
    columns = ("Variant", "Retention (%)", "Acquisition (%)")
    caption = f"Component ablation at A = {found.scale.anchors}"
    rows = drawing.rows_by_method(_at_default_settings(found), names, (retained, learned), paper)
    return drawing.measured_table("tab:cplus-ablation", "Table 1", columns, rows, caption, "Published: one seed.")


def tab_ema_selection(found: Collected) -> Table:
    """Mean and tail reduction, with and without smoothing.

    Paper: Table 3.
    """
    names = {"cplus-no-ema": ("Mean", "None"), "cplus": ("Mean", "0.9"), "cplus-cvar": ("CVaR", "0.9")}
    paper = {method: (TABLE_3.numbers[method], 100.0) for method in names}
    own = pick(found.studies["e04"].results, num_anchors=64, anchor_weight=0.5, beta=0.9)
    rows = drawing.rows_by_method(own, names, (retained, learned), paper)
    columns = ("Reduction", "EMA", "Retention (%)", "Acquisition (%)")
    caption = "Reference reduction and mask smoothing at A = 64"
    return drawing.measured_table("tab:ema-selection", "Table 3", columns, rows, caption, "Published: three runs.")


def _at_default_settings(found: Collected) -> list[RunResult]:
    """The runs of the component ablation: one budget, default blend, smoothing and generation."""
    runs, anchors = found.studies["e04"].results, found.scale.anchors
    return pick(runs, num_anchors=anchors, anchor_weight=0.5, beta=0.9, shots=2, temperature=0.8)


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention by source, with the paper's."""
    what, methods = "Retention, anchors alone / probes alone / both (%)", ("cplus-anchors", "cplus-probes", "cplus")
    return [drawing.compare_methods(what, _at_default_settings(found), methods, TABLE_1.numbers)]
