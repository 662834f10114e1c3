"""Facts of a real model: what each method keeps at each rate where everything is learned; not in the paper."""

from __future__ import annotations

from cplus.studies.collected import Collected
from cplus.studies.facts import BASE, RATES
from cplus.studies.figures.drawing import method_name
from cplus.studies.figures.tables import ADDED_HERE, ComparisonLine, Table, cell, joined, joined_names
from cplus.studies.summaries import over_seeds, pick, retained


def tab_facts(found: Collected) -> Table:
    """Every method and rate, the highest Retention first."""
    rows = sorted(found.studies["facts"].summary.rows, key=lambda row: -row.figures["retention"].mean)
    columns = ("retention", "acquisition", "updates", "seconds")
    return Table(
        label="tab:facts",
        paper="Added here",
        caption=f"{BASE.model} learns {BASE.num_new} questions of {BASE.task} that it had wrong, until 99 % are right; "
        f"Retention on {BASE.num_past} that it had right; {BASE.num_anchors} anchors, {BASE.num_probes} probes.",
        columns=("method", "rate", *columns),
        rows=tuple(
            (
                method_name(row.at["method"]),
                f"{row.at['lr']:.2g}",
                *(cell(row.figures.get(name)) for name in columns),
            )
            for row in rows
        ),
    )


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention of every method at the first rate."""
    runs = pick(found.studies["facts"].runs, lr=BASE.lr)
    return [
        ComparisonLine(
            what=f"Retention where 99 % are learned, {joined_names(tuple(RATES))} (%)",
            measured=joined([over_seeds(pick(runs, method=method), retained) for method in RATES]),
            published=ADDED_HERE,
        )
    ]


FIGURES = ()
TABLES = (tab_facts,)
