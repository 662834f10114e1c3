"""E8, aggressive schedule: Acquisition, Retention and accuracy under one large learning rate (Table 5)."""

from __future__ import annotations

from cplus.studies.collected import Collected
from cplus.studies.e08 import METHODS, overall
from cplus.studies.figures.drawing import method_name, seed_count
from cplus.studies.figures.tables import (
    ComparisonLine,
    Table,
    compare_methods,
    joined_names,
    published_numbers,
    rows_by_method,
)
from cplus.studies.summaries import learned, retained


def tab_fixed_aggressive_update(found: Collected) -> Table:
    """Acquisition, Retention and overall accuracy under one large learning rate.

    Paper: Table 5.
    """
    names = {method: (method_name(method),) for method in METHODS}
    metrics = (learned, retained, overall)
    rows, drawn = rows_by_method(found.studies["e08"].runs, names, metrics, published_numbers("e08"))
    lr, epochs = found.scale.aggressive_schedule
    return Table(
        label="tab:fixed-aggressive-update",
        paper="Table 5",
        caption=(
            f"Learning rate {lr:g} for {epochs} epochs, {seed_count(drawn)}. Published: 1e-05 for 10 epochs, seed 0."
        ),
        columns=("Method", "Acquisition (%)", "Retention (%)", "Overall accuracy (%)"),
        rows=rows,
    )


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention and Acquisition by method, with the paper's."""
    runs, paper = found.studies["e08"].runs, published_numbers("e08")
    return [
        compare_methods(
            f"{name}, {joined_names(METHODS)} (%)",
            runs,
            METHODS,
            {method: values[column] for method, values in paper.items()},
            metric,
        )
        for name, column, metric in (("Retention", 1, retained), ("Acquisition", 0, learned))
    ]


FIGURES = ()
TABLES = (tab_fixed_aggressive_update,)
