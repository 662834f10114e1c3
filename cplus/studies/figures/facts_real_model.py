"""Facts of real models: what each method keeps at each rate where everything is learned; not in the paper."""

from __future__ import annotations

from cplus.studies.collected import Collected
from cplus.studies.facts import CELLS, METHODS
from cplus.studies.figures.drawing import method_name
from cplus.studies.figures.tables import ADDED_HERE, ComparisonLine, Table, cell, joined, joined_names
from cplus.studies.summaries import over_seeds, pick, retained


def tab_facts(found: Collected) -> Table:
    """Every model, method and rate, the highest Retention first."""
    rows = sorted(
        found.studies["facts"].summary.rows, key=lambda row: (row.at["model"], -row.figures["retention"].mean)
    )
    columns = ("retention", "acquisition", "updates", "seconds")
    settings = "; ".join(
        f"{model}: {cell.base.num_new} new and {cell.base.num_past} past questions of {cell.base.task} by "
        f"{cell.base.interface}, {cell.base.num_anchors} anchors, {cell.base.num_probes} probes"
        for model, cell in CELLS.items()
    )
    return Table(
        label="tab:facts",
        paper="Added here",
        caption=f"What is kept where 99 % of the new questions are right. {settings}.",
        columns=("model", "method", "rate", *columns),
        rows=tuple(
            (
                row.at["model"],
                method_name(row.at["method"]),
                f"{row.at['lr']:.2g}",
                *(cell(row.figures.get(name)) for name in columns),
            )
            for row in rows
        ),
    )


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention of every method at each model's first rate."""
    runs = found.studies["facts"].runs
    return [
        ComparisonLine(
            what=f"{model}: Retention where 99 % are learned, {joined_names(METHODS)} (%)",
            measured=joined(
                [over_seeds(pick(runs, model=model, method=method, lr=own.base.lr), retained) for method in METHODS]
            ),
            published=ADDED_HERE,
        )
        for model, own in CELLS.items()
    ]


FIGURES = ()
TABLES = (tab_facts,)
