"""`cplus methods`: the table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from cplus import models
from cplus.base.terminal import output, print_json
from cplus.cli import options
from cplus.cli.options import Json
from cplus.core.rows import Encoded
from cplus.methods.table import METHODS


def methods(
    costs: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Measure each method's extra memory on this model, e.g. 'toy'.",
            autocompletion=options.models,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List every method: what it does, which rows it uses and which paper it is from."""
    options.check({"model": costs})

    from cplus.lab.costs import rows_formula

    if costs is not None:
        _costs(costs, json=json)
        return
    if json:
        rows = [
            {
                "name": row.name,
                "summary": row.summary,
                "trains": "weights"
                if row.adapter is None
                else getattr(row.adapter, "path", "adapters").rpartition(":")[2],
                "trains_on": list(row.train_on),
                "sees": list(row.needs),
                "evidence": [{"weight": weight, "source": kind} for weight, kind in row.evidence],
                "refresh": row.refresh if row.evidence else None,
                "strength": row.strength,
                "cost": rows_formula(row),
                "paper": row.paper,
            }
            for row in METHODS.values()
        ]
        print_json({"methods": rows})
        return
    table = Table(box=None, show_header=False)
    table.add_column("method", no_wrap=True, style="bold")
    table.add_column("what it does")
    for row in METHODS.values():
        evidence = " + ".join(f"{weight:g} x {kind}" for weight, kind in row.evidence)
        facts = [
            f"trains on {' + '.join(row.train_on)}",
            *([f"evidence {evidence}"] if evidence else []),
            f"rows: {rows_formula(row)}",
            row.paper,
        ]
        table.add_row(row.name, Text.assemble(row.summary, "\n", ("; ".join(facts), "dim")))
    output.print(table)
    output.print("n new rows, A anchors, N probes; a row costs 6 P L FLOPs. '--costs MODEL' measures memory too.")


def _costs(model: str, *, json: bool) -> None:
    """Rows per epoch by formula; extra bytes per parameter as the method reports and as measured in a step."""
    from cplus.lab import costs

    loaded = models.load(model)
    tokens = tuple(range(3, 11))
    table = costs.costs(loaded.model, [Encoded(tokens[:6], tokens[i : i + 1]) for i in range(4)])
    if json:
        print_json({"model": model, "costs": [asdict(row) for row in table]})
        return
    grid = Table(box=None, header_style="bold")
    for column in ("method", "rows through the model", "extra bytes/param, by its own count", "measured"):
        grid.add_column(column, justify="right" if "measured" in column or "bytes" in column else "left")
    for row in table:
        grid.add_row(row.method, row.rows, f"{row.reported:.2f}", f"{row.measured:.2f}")
    output.print(grid)
    output.print("n new rows, A anchors, N probes; a row costs 6 P L FLOPs. Memory is what is allocated within a step.")
