"""E14: does the topic cue matter, and what is in the banks?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cplus.lab.drawing import PALETTE, budget_axis, line, panels, picture, points_by
from cplus.lab.records import RunResult
from cplus.lab.scales import SCARCE, Scale
from cplus.lab.study import Cell, Collected, ComparisonLine, Picture, Published, Summary, Table
from cplus.lab.summaries import KEPT_AND_LEARNED, Metric, above, diagnosed, pick, retained, shown, table
from cplus.training.settings import RunSpec

TITLE = "Topic cue and bank audit"
QUESTION = "Does the topic cue matter, and what is in the banks?"
PAPER = "App. C.1, C.2"
APP_C_2 = Published(
    "App. C.2, three banks of 512 probes against 1,096 evaluated prompts",
    {"probes": 1536, "unique": 1536, "mean": 0.915, "median": 0.984, "p10": 0.696, "exact": 1, "near": 2},
)
APP_C_1 = Published("App. C.1, one seed", {"the topic cue": "did not consistently improve Retention"})

NUM_BANKS = 3
"""The paper audits three banks."""


def runs(scale: Scale) -> list[RunSpec]:
    """CPLUS with and without the topic cue at the scarce budgets, each run with an audit of its bank.

    At the budget of the other comparisons there are as many seeds as the paper audits banks.
    """
    seeds = {budget: scale.seeds_where_one for budget in SCARCE if budget in scale.budgets}
    seeds[scale.anchors] = max(scale.seeds_where_one, scale.seeds_where_three)
    return [
        scale.at(topics=cue, num_anchors=budget, external=(), diagnose=("bank",), seed=seed)
        for cue in (False, True)
        for budget, count in seeds.items()
        for seed in range(count)
    ]


AUDITED: Mapping[str, Metric] = {
    **KEPT_AND_LEARNED,
    "yield": diagnosed("bank", "yield"),
    "confidence": diagnosed("bank", "confidence", "mean"),
    "exact copies of evaluated rows": diagnosed("bank", "against", "exact"),
    "near copies of evaluated rows": diagnosed("bank", "against", "near"),
}


def banks(results: Sequence[RunResult], *, cue: bool) -> list[RunResult]:
    """The runs whose banks are compared side by side: one budget, the first seeds."""
    own = [result for result in results if result.spec.topics == cue and "bank" in result.diagnostics]
    counts = [result.spec.num_anchors for result in own]
    most = max(set(counts), key=lambda budget: (counts.count(budget), budget), default=0)
    return sorted(pick(own, num_anchors=most), key=lambda result: result.spec.seed)[:NUM_BANKS]


def pooled(results: Sequence[RunResult]) -> dict[str, float] | None:
    """The figures of several banks together, as the paper gives them; None without a bank.

    Paper: App. C.2.
    """
    from cplus.probes.audit import together  # scipy and numpy take a second to import

    found = [result.diagnostics["bank"] for result in results]
    return together(found) if found else None


def summary(mine: Sequence[RunResult]) -> Summary:
    """Retention with and without the cue by budget, and the audit of the banks."""
    budgets = sorted({result.spec.num_anchors for result in mine})
    here = [pick(mine, num_anchors=budget) for budget in budgets]
    words = "CPLUS keeps more with the topic cue than without it, A="
    claims = tuple(
        above(f"{words}{budget}", pick(own, topics=True), pick(own, topics=False))
        for budget, own in zip(budgets, here, strict=True)
    )
    audited, found = "not run", pooled(banks(mine, cue=True))
    if found is not None:
        audited = (
            f"{found['unique']:,.0f} of {found['probes']:,.0f} probes are unique, mean confidence {found['mean']:.3f}, "
            f"{found['exact']:.0f} exact and {found['near']:.0f} near copies of evaluated rows"
        )
    gains = ", ".join(f"{shown(one.margin, sign=True)} at A={a}" for one, a in zip(claims, budgets, strict=True))
    answer = f"The topic cue changes Retention by {gains or 'not run'} points; in the banks with the cue {audited}."
    return Summary(rows=table(mine, ("topics", "num_anchors"), AUDITED), answer=answer, claims=claims)


# E14, topic cue and bank audit: Retention with and without the cue, and the banks side by side (App. C.1, C.2).


CUES = {"without the cue": False, "with the cue": True}
LINES = {
    "probes": "probes",
    "unique": "unique inputs",
    "mean": "confidence, mean",
    "median": "confidence, median",
    "p10": "confidence, tenth percentile",
    "exact": "exact copies of evaluated rows",
    "near": "token Jaccard of at least 0.9",
}


def fig_topic_cue(found: Collected) -> Picture:
    """Retention and the share of valid requests by anchor budget, with the topic cue and without it."""
    runs = found.studies["e14"].results
    figure, axes = panels(2, width=3.8, height=2.7)
    metrics: dict[str, Metric] = {
        "Retention (%)": retained,
        "requests that became a probe (%)": lambda result: 100.0 * float(result.diagnostics["bank"]["yield"]),
    }
    for axis, (words, metric) in zip(axes, metrics.items(), strict=True):
        for (name, cue), colour, marker in zip(CUES.items(), PALETTE, "so", strict=False):
            line(axis, points_by(pick(runs, topics=cue), "num_anchors", metric), name, colour, marker)
        budget_axis(axis, (result.spec.num_anchors for result in runs))
        axis.set_ylabel(words)
    caption = (
        "Left: Retention of CPLUS with the 24-area topic cue in its requests and without it. Right: the share of "
        "requests whose text was valid, new and labelled. The paper reports no consistent gain, on one seed."
    )
    return picture(figure, "fig:topic-cue", "App. C.1", caption)


def tab_bank_audit(found: Collected) -> Table:
    """The banks side by side, with the cue and without it, and together with the paper's three."""
    groups = {name: banks(found.studies["e14"].results, cue=cue) for name, cue in CUES.items()}
    columns = {f"{name}, seed {run.spec.seed}": pooled([run]) for name, own in groups.items() for run in own}
    columns |= {f"together, {name}": pooled(own) for name, own in groups.items()}

    def text(key: str, figures: Mapping[str, float] | None) -> str:
        if figures is None:
            return "not run"
        return f"{figures[key]:.3f}" if key in ("mean", "median", "p10") else f"{figures[key]:,.0f}"

    rows: list[tuple[str | Cell, ...]] = []
    for key, words in LINES.items():
        *others, last = (text(key, figures) for figures in columns.values())
        cells = (*(Cell(measured=each) for each in others), Cell(measured=last, published=text(key, APP_C_2.numbers)))
        rows.append((words, *cells))
    caption = "Banks of the first seeds, then together; published: three banks with the cue against 1,096 prompts."
    about = {"label": "tab:bank-audit", "paper": "App. C.2", "caption": caption}
    return Table(**about, columns=("figure", *columns), rows=tuple(rows))


def comparison(found: Collected) -> list[ComparisonLine]:
    """The cue's gain, with what the paper says of it."""
    claims = found.studies["e14"].summary.claims
    gains = "; ".join(f"A = {claim.says.rpartition('=')[2]}: {shown(claim.margin, sign=True)}" for claim in claims)
    what = "CPLUS with the topic cue minus without it (points of Retention)"
    return [ComparisonLine(what, gains or "not run", "no consistent gain")]
