"""E14, topic cue and bank audit: Retention with and without the cue, and the banks side by side (App. C.1, C.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cplus.experiment.record import RunResult
from cplus.studies.collected import Collected
from cplus.studies.e14 import banks, pooled
from cplus.studies.figures.drawing import (
    PALETTE,
    Picture,
    budget_axis,
    estimates_of,
    legend,
    line,
    mark_not_run,
    panels,
    points_by,
    seed_count,
)
from cplus.studies.figures.tables import Cell, ComparisonLine, Table, published_numbers
from cplus.studies.summaries import pick

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
    runs = found.studies["e14"].runs
    figure, (left, right) = panels(2, width=3.8, height=2.7)
    drawn = []
    for (name, cue), colour, marker in zip(CUES.items(), PALETTE, "so", strict=False):
        own = pick(runs, topics=cue)
        kept = points_by(own, "num_anchors")
        line(left, kept, name, colour, marker)
        line(right, points_by(own, "num_anchors", _yield), name, colour, marker)
        drawn += estimates_of({name: kept})
    for axis, label in ((left, "Retention (%)"), (right, "requests that became a probe (%)")):
        budget_axis(axis, (result.spec.num_anchors for result in runs))
        axis.set_ylabel(label)
        if not runs:
            mark_not_run(axis)
    legend(figure)
    caption = (
        "Left: Retention of CPLUS with the 24-area topic cue in its requests and without it. Right: the share of "
        f"requests whose text was valid, new and labelled. Means and standard errors, {seed_count(drawn)}. The paper "
        "reports no consistent gain from the cue, on one seed."
    )
    return Picture(label="fig:topic-cue", paper="App. C.1", caption=caption, figure=figure)


def _yield(result: RunResult) -> float | None:
    bank = result.diagnostics.get("bank")
    return None if bank is None else 100.0 * bank["yield"]


def tab_bank_audit(found: Collected) -> Table:
    """The banks side by side, with the cue and without it, and together with the paper's three."""
    runs = found.studies["e14"].runs
    paper = published_numbers("e14")
    groups = {name: banks(runs, cue=cue) for name, cue in CUES.items()}
    columns = [f"{name}, seed {result.spec.seed}" for name, own in groups.items() for result in own]
    rows: list[tuple[str | Cell, ...]] = []
    for key, words in LINES.items():
        cells = [Cell(measured=_number(key, _figures(result)[key])) for own in groups.values() for result in own]
        both: list[Cell] = []
        for name, own in groups.items():
            together: Mapping[str, float] | None = pooled(own)
            text = "not run" if together is None else _number(key, together[key])
            both.append(Cell(measured=text, published=_number(key, paper[key]) if CUES[name] else None))
        rows.append((words, *cells, *both))
    return Table(
        label="tab:bank-audit",
        paper="App. C.2",
        caption=(
            "Banks of the first seeds, one column each, then together; published: three banks with the cue against "
            "1,096 evaluated prompts."
        ),
        columns=("figure", *columns, *(f"together, {name}" for name in CUES)),
        rows=tuple(rows),
    )


def _figures(result: RunResult) -> Mapping[str, Any]:
    return pooled([result]) or {}


def _number(key: str, value: float) -> str:
    return f"{value:.3f}" if key in ("mean", "median", "p10") else f"{value:,.0f}"


def comparison(found: Collected) -> list[ComparisonLine]:
    """The cue's gain, and the audit of the banks together, with the paper's."""
    own = found.studies["e14"]
    gains = [f"A = {claim.says.rpartition('=')[2]}: {_margin(claim.margin)}" for claim in own.summary.claims]
    together, paper = pooled(banks(own.runs, cue=True)), published_numbers("e14")
    return [
        ComparisonLine(
            what="CPLUS with the topic cue minus without it (points of Retention)",
            measured="; ".join(gains) or "not run",
            published="no consistent gain",
        ),
        ComparisonLine(
            what="banks together: unique / probes; confidence mean, median, p10; exact, near copies",
            measured="not run" if together is None else _together(together),
            published=_together(paper),
        ),
    ]


def _margin(found: Any) -> str:
    from cplus.studies.summaries import shown

    return shown(found, sign=True)


def _together(numbers: Mapping[str, float]) -> str:
    parts: Sequence[str] = [f"{numbers['unique']:,.0f} / {numbers['probes']:,.0f}"]
    confidence = ", ".join(f"{numbers[name]:.3f}" for name in ("mean", "median", "p10"))
    return "; ".join((*parts, confidence, f"{numbers['exact']:.0f}, {numbers['near']:.0f}"))


FIGURES = (fig_topic_cue,)
TABLES = (tab_bank_audit,)
