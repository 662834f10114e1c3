"""The receipt as one self-contained page, rendered from a record and from nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

from markupsafe import Markup

from cplus.evaluation.requirements import sentence as required
from cplus.plotting import label
from cplus.receipts.comparisons import flat
from cplus.receipts.contents import Receipt, RowComparison, RowSet
from cplus.receipts.curves import HEIGHT, WIDTH, charts
from cplus.receipts.html import TEMPLATES, environment, policy
from cplus.receipts.measures import state
from cplus.receipts.record import from_json
from cplus.receipts.repaired import shown
from cplus.receipts.verdict import lead, p_value, percent, sentences, signed

_COSTS = {
    "seconds": "time of the adaptation",
    "extra_bytes": "extra memory of the gate",
    "training_flops": "training",
    "preservation_flops": "preservation",
    "training_rows": "rows trained on",
    "training_tokens": "tokens trained on",
    "training_padded": "the same with padding",
    "training_forward": "tokens in forward passes of training",
    "preservation_rows": "rows of evidence",
    "preservation_tokens": "tokens of evidence",
    "preservation_padded": "the same with padding",
    "preservation_forward": "tokens in forward passes of preservation",
}


def render(record: Any) -> str:
    """The page of a record as `Receipt.to_json` gives it; an altered record is refused."""
    receipt = from_json(record)
    found = record["figures"]
    ledger = [*(name for name in _COSTS if name in receipt.cost), *sorted(receipt.cost.keys() - _COSTS)]
    drawn = charts(receipt)
    every = [row for own in receipt.sets for row in own.rows]
    table = _rows(receipt)
    script = (TEMPLATES / "receipt.js").read_text(encoding="utf-8")
    pages = environment()
    pages.filters |= {"percent": percent, "p_value": p_value, "method": label, "signed": signed, "required": required}
    pages.globals["shown"] = shown
    return pages.get_template("receipt.html").render(
        receipt=receipt,
        sha256=record["sha256"],
        figures=found,
        lead=lead(found),
        sentences=sentences(found),
        charts=drawn,
        legend=list({line.label: line for chart in drawn for line in chart.lines}.values()),
        size=(WIDTH, HEIGHT),
        costs=[(_COSTS.get(name, name.replace("_", " ")), cost(name, receipt.cost[name])) for name in ledger],
        settings=flat(receipt.settings),
        environment=flat(receipt.environment),
        kinds=Counter(row[1] for row in table),
        differing=found["differing"],
        labels=sorted({row.label for row in every if row.label is not None}),
        losses=any(row.nll_after is not None for row in every),
        rows=table,
        script=Markup(script),  # our own file, the only script the policy admits
        policy=policy(script),
    )


def cost(name: str, value: float) -> str:
    """A figure of the ledger with its unit, which its name ends in.

    >>> cost("training_flops", 3_210_000_000_000), cost("seconds", 3725.0), cost("training_rows", 9600)
    ('3.21 TFLOP', '1 h 2 min', '9,600')
    """
    if name.endswith("flops"):
        return scaled(value, "FLOP")
    if name.endswith("bytes"):
        return scaled(value, "B")
    if name.endswith("seconds"):
        minutes, seconds = divmod(value, 60)
        if minutes < 60:
            return f"{minutes:.0f} min {seconds:.0f} s" if minutes else f"{seconds:.1f} s"
        return f"{minutes // 60:.0f} h {minutes % 60:.0f} min"
    return f"{value:,}"


def scaled(value: float, unit: str = "") -> str:
    """A number of three digits with the prefix of its thousands.

    >>> scaled(134_515_008), scaled(999)
    ('135 M', '999')
    """
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".strip()


def _rows(receipt: Receipt) -> list[list[Any]]:
    """The table of rows in the order that `receipt.js` reads."""
    return [
        [
            place,
            _outcome(own, row, receipt.noise_floor),
            row.id,
            row.input,
            row.gold,
            row.before,
            row.after,
            row.confidence_before,
            row.confidence_after,
            row.label,
            row.nll_before,
            row.nll_after,
            row.answer_nll_before,
            row.answer_nll_after,
        ]
        for place, own in enumerate(receipt.sets)
        for row in own.rows
    ]


def _outcome(own: RowSet, row: RowComparison, noise_floor: float | None) -> str:
    """A judged row's outcome, or the state of an answer that was to be kept."""
    if own.followed:
        return state(row, noise_floor)
    return row.kind if own.judged and row.kind else "unjudged"
