"""`cplus methods`: the table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from cplus.base.terminal import output, print_json
from cplus.cli.options import Json
from cplus.methods.table import METHODS, Method


def methods(json: Json = False) -> None:
    """List every method: what it does, which rows it uses and which paper it is from."""
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
    output.print("n new rows, A anchors, N probes; a row costs 6 P L FLOPs.")


def rows_formula(method: Method) -> str:
    """Rows per epoch with n new rows, A anchors and N probes, at 6 P L FLOPs each; one-time passes are not counted.

    >>> rows_formula(METHODS["cplus"]), rows_formula(METHODS["cplus-rotating"]), rows_formula(METHODS["agem"])
    ('n + A + N per epoch', 'n + A + N/4 per epoch', 'n per epoch, A every step')
    >>> rows_formula(METHODS["replay"]), rows_formula(METHODS["anchor-probe-replay"])
    ('2n per epoch', 'n + 2N per epoch')
    >>> rows_formula(METHODS["divergence"])
    'n + 0.125n per epoch'
    """
    sizes = {"probes": "N", "anchors": "A", "constant": "N", "balanced": "N", "beginnings": "N", "synthetic": "n"}
    parts = ["n", *([f"{method.share:g}n"] if method.share else [])]
    for kind in () if method.share else method.train_on[1:]:
        weight = "N" if "probes" in method.train_on else "n"
        parts.append(weight if kind == "anchors" else sizes[kind])
    seen = [
        sizes[kind] if method.parts == 1 or kind == "anchors" else f"N/{method.parts}" for _, kind in method.evidence
    ]
    if method.refresh == "epoch":
        parts += seen
    counts = ((parts.count(part), part) for part in dict.fromkeys(parts))
    text = " + ".join(part if count == 1 else f"{count}{part}" for count, part in counts) + " per epoch"
    if isinstance(method.refresh, int) and method.evidence:
        text += f", {' + '.join(seen)} every {'step' if method.refresh == 1 else f'{method.refresh} steps'}"
    passes = method.objective.anchor_passes
    text += f", A every step ({6 * passes:g} P L)" if passes else ""
    read = [{"new": "n", **sizes}[kind] for kind in method.objective.read_by_base]
    return text + (f", {' + '.join(read)} by the frozen model too (2 P L)" if read else "")
