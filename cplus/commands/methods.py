"""`cplus methods`: the table."""

from __future__ import annotations

from typing import Annotated

import typer


def methods(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """List every method: what it does, what data it sees, where it comes from."""
    from rich.table import Table

    from cplus.methods import METHODS
    from cplus.terminal import output, print_json

    if json:
        rows = [
            {
                "name": row.name,
                "summary": row.summary,
                "trains_on": list(row.train_on),
                "sees": list(row.needs),
                "evidence": [{"weight": weight, "source": kind} for weight, kind in row.evidence],
                "refresh": row.refresh if row.evidence else None,
                "paper": row.paper,
            }
            for row in METHODS.values()
        ]
        print_json({"methods": rows})
        return
    table = Table(box=None, header_style="bold")
    for column in ("method", "what it does", "trains on", "evidence", "source"):
        table.add_column(column, overflow="fold")
    for row in METHODS.values():
        evidence = " + ".join(f"{weight:g} x {kind}" for weight, kind in row.evidence) or "-"
        table.add_row(row.name, row.summary, " + ".join(row.train_on), evidence, row.paper)
    output.print(table)
