"""Base, tuned and repaired model side by side, and what the repair did in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cplus.receipts.contents import Repair, TunedSet


def repaired(repair: Repair, sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a repair; those of base and repaired model come from the sets of the receipt.

    `helped` is whether every past figure is better than with the tuned model; None where nothing of it was measured.
    """
    tuned = {own.name: own for own in repair.sets}
    rows = [row for own in sets if own["name"] in tuned for row in _rows(own, tuned[own["name"]])]
    past = [row for row in rows if row["kind"] == "retention"]
    better = [row["repaired"] < row["tuned"] if _is_loss(row) else row["repaired"] > row["tuned"] for row in past]
    return {
        "undone": repair.undone,
        "moved": repair.moved,
        "percent": 100 * repair.undone / repair.moved,
        "rows": rows,
        "helped": all(better) if better else None,
    }


def _rows(own: Mapping[str, Any], tuned: TunedSet) -> Iterator[dict[str, Any]]:
    named = {"name": own["name"], "kind": own["kind"]}
    if own["kind"] == "retention" and own["retention"] and tuned.retention is not None:
        yield {**named, "quantity": "Retention", "base": 100.0, "tuned": tuned.retention,
               "repaired": own["retention"]["percent"]}  # fmt: skip
    elif own["kind"] in ("acquisition", "validation") and own["acquisition"] and tuned.acquisition is not None:
        yield {**named, "quantity": "Acquisition", "base": 0.0, "tuned": tuned.acquisition,
               "repaired": own["acquisition"]["percent"]}  # fmt: skip
    elif own["after"] and tuned.right is not None:
        yield {**named, "quantity": "right answers", "base": own["before"]["percent"], "tuned": tuned.right,
               "repaired": own["after"]["percent"]}  # fmt: skip
    if own["nll"] and tuned.nll is not None:
        yield {**named, "quantity": "loss", "base": own["nll"]["before"], "tuned": tuned.nll,
               "repaired": own["nll"]["after"]}  # fmt: skip


def _is_loss(row: Mapping[str, Any]) -> bool:
    return bool(row["quantity"] == "loss")


def shown(row: Mapping[str, Any], value: float) -> str:
    """A value of a row with its unit.

    >>> shown({"quantity": "Retention"}, 57.25), shown({"quantity": "loss"}, 0.67)
    ('57.2\xa0%', '0.670')
    """
    return f"{value:.3f}" if _is_loss(row) else f"{value:.1f}\u00a0%"


def sentences(found: Mapping[str, Any]) -> list[str]:
    """What the repair changed, from the tuned model to the repaired one."""
    moved = ", ".join(
        f"{row['quantity']} on {row['name']} {shown(row, row['tuned'])} to {shown(row, row['repaired'])}"
        for row in found["rows"]
        if row["kind"] != "external"
    )
    said = [
        f"The repair reset {found['percent']:.1f}\u00a0% of the weights that training had changed"
        + (f"; from tuned to repaired: {moved}." if moved else ".")
    ]
    if found["helped"] is False:
        said.append("It did not improve the past rows measured here.")
    return said
