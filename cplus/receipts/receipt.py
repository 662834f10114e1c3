"""The receipt: fill a `Receipt`, write it as `receipt.json` and as the page `receipt.html`, read it again.

The page shows the record and nothing else; a record that was altered has no page.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cplus import files
from cplus.evaluation.requirements import Requirement
from cplus.receipts.contents import (
    BankAudit,
    ComparedRun,
    GateShare,
    ModelId,
    Overlap,
    Point,
    Receipt,
    Repair,
    RowComparison,
    RowSet,
    SampleProbe,
    TunedSet,
)
from cplus.receipts.page import render
from cplus.receipts.record import from_json, to_json
from cplus.receipts.rows import Losses, rows

__all__ = [
    "PAGE",
    "RECORD",
    "BankAudit",
    "ComparedRun",
    "GateShare",
    "Losses",
    "ModelId",
    "Overlap",
    "Point",
    "Receipt",
    "Repair",
    "Requirement",
    "RowComparison",
    "RowSet",
    "SampleProbe",
    "TunedSet",
    "bank_audit",
    "read_receipt",
    "rows",
    "write_receipt",
]

RECORD, PAGE = "receipt.json", "receipt.html"
_SAMPLE = 6


def write_receipt(receipt: Receipt, folder: Path) -> dict[str, Any]:
    """Write the record and its page into a folder, each whole or not at all, and return the record."""
    record = to_json(receipt)
    page = render(record)  # before anything is written
    files.write_json(folder / RECORD, record)
    files.write_text(folder / PAGE, page)
    return record


def read_receipt(folder: Path) -> Receipt:
    """The receipt of a folder; an altered record, or a page that is not the record's, is refused."""
    raw = files.read_json(folder / RECORD)
    receipt = from_json(raw, where=str(folder / RECORD))
    if (folder / PAGE).read_text(encoding="utf-8") != render(raw):
        raise ValueError(
            f"{folder / PAGE}: expected the page of the {RECORD} beside it; it was edited, or another version "
            f"rendered it: write it again from the record"
        )
    return receipt


def bank_audit(audit: Mapping[str, Any]) -> BankAudit:
    """The part of an audit by `cplus.probes.audit.audit` that a receipt keeps."""
    return BankAudit(
        sha256=audit["bank"]["probes_sha256"],
        probes=audit["probes"],
        unique=audit["unique"],
        requests=audit["counts"]["requests"],
        rejected=dict(audit["counts"]["rejected"]),
        confidence=dict(audit["confidence"]),
        divergence=audit["labels"]["divergence"],
        overlaps=tuple(
            Overlap(name=name, rows=one["rows"], exact=one["exact"], near=one["near"])
            for name, one in audit["against"].items()
        ),
        sample=tuple(
            SampleProbe(input=probe["text"], answer=probe["answer"], confidence=probe["confidence"])
            for probe in audit["sample"][:_SAMPLE]
        ),
    )
