"""The figures of a receipt, all from its rows: shares with Wilson bounds, exact McNemar, losses, labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cplus.evaluation.letters import acquisition_by_label, macro, retention_by_label
from cplus.evaluation.outcomes import Flip, Kind, acquisition, retention
from cplus.evaluation.statistics import Rate, estimate, mcnemar, share
from cplus.receipts.curves import matched

if TYPE_CHECKING:
    from cplus.receipts.contents import Receipt, Row, RowSet

_FOR_RETENTION, _FOR_ACQUISITION = ("retention", "task"), ("acquisition", "task")
_KINDS: tuple[Kind, ...] = ("kept", "lost", "gained", "still_wrong")


def figures(receipt: Receipt) -> dict[str, Any]:
    """Every figure of the page, as plain values; percentages are 0-100, bounds 95 % by Wilson."""
    pooled = {
        "retention": _pooled(receipt.sets, _FOR_RETENTION, _retained),
        "acquisition": _pooled(receipt.sets, _FOR_ACQUISITION, _acquired),
    }
    found: dict[str, Any] = {name: rate.row() if rate else None for name, rate in pooled.items()}
    found["sets"] = [_set(own) for own in receipt.sets]
    found["labels"] = _labels(receipt.sets)
    found["unselected"] = _unselected(receipt.sets)
    found["matched"] = matched(receipt.method, receipt.curve, receipt.comparisons)
    found["preservation_percent"] = _preservation(receipt.cost)
    found["requirements"] = [
        {"metric": asked.metric, "at_least": asked.at_least, **_met(pooled[asked.metric], asked.at_least)}
        for asked in receipt.requirements
    ]
    return found


def _flips(rows: Sequence[Row]) -> list[Flip]:
    return [
        Flip(
            id=row.id,
            kind=row.kind,
            before=row.before,
            after=row.after,
            confidence_before=row.confidence_before,
            confidence_after=row.confidence_after,
        )
        for row in rows
        if row.kind is not None
    ]


def _retained(table: Sequence[Flip]) -> Rate | None:
    return retention(table) if any(flip.kind in ("kept", "lost") for flip in table) else None


def _acquired(table: Sequence[Flip]) -> Rate | None:
    return acquisition(table) if any(flip.kind in ("gained", "still_wrong") for flip in table) else None


def _pooled(
    sets: Sequence[RowSet], kinds: tuple[str, str], rate: Callable[[Sequence[Flip]], Rate | None]
) -> Rate | None:
    return rate([flip for own in sets if own.kind in kinds for flip in _flips(own.rows)])


def _set(own: RowSet) -> dict[str, Any]:
    table = _flips(own.rows)
    counts = Counter(flip.kind for flip in table)
    kept, learned = _retained(table), _acquired(table)
    return {
        "name": own.name,
        "kind": own.kind,
        "interface": own.interface,
        "rows": len(own.rows),
        "counts": {kind: counts[kind] for kind in _KINDS} | {"unjudged": len(own.rows) - len(table)},
        "before": share(flip.kind in ("kept", "lost") for flip in table).row() if table else None,
        "after": share(flip.kind in ("kept", "gained") for flip in table).row() if table else None,
        "retention": kept.row() if kept else None,
        "acquisition": learned.row() if learned else None,
        # Rows chosen because they were right (or wrong) before can only change one way: the test would say nothing.
        "mcnemar_p": mcnemar(counts["lost"], counts["gained"]) if kept and learned else None,
        "nll": _losses(own.rows),
    }


def _losses(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The mean loss a token over all responses, and the rise of a response's own with its standard error."""
    known = [
        (row.tokens, row.nll_before, row.nll_after)
        for row in rows
        if row.tokens is not None and row.nll_before is not None and row.nll_after is not None
    ]
    if not known:
        return None
    tokens = sum(count for count, _, _ in known)
    rise = estimate([after - before for _, before, after in known])
    return {
        "before": sum(count * before for count, before, _ in known) / tokens,
        "after": sum(count * after for count, _, after in known) / tokens,
        "rise": rise.mean,
        "error": rise.error,
        "rows": len(known),
        "tokens": tokens,
    }


def _labels(sets: Sequence[RowSet]) -> dict[str, Any] | None:
    """Retention and Acquisition per label and their unweighted means, where rows have labels."""
    kept = _by_label(sets, _FOR_RETENTION, retention_by_label)
    learned = _by_label(sets, _FOR_ACQUISITION, acquisition_by_label)
    if not kept and not learned:
        return None
    return {
        "rows": [
            {
                "label": label,
                "retention": kept[label].row() if label in kept else None,
                "acquisition": learned[label].row() if label in learned else None,
            }
            for label in sorted({*kept, *learned})
        ],
        "macro_retention": macro(kept) if kept else None,
        "macro_acquisition": macro(learned) if learned else None,
    }


def _by_label(
    sets: Sequence[RowSet],
    kinds: tuple[str, str],
    rates: Callable[[Sequence[Flip], Mapping[str, str]], dict[str, Rate]],
) -> dict[str, Rate]:
    # Two sets may hold rows of one id, so a row goes by its set's name too.
    rows = {f"{own.name}/{row.id}": row for own in sets if own.kind in kinds for row in own.rows}
    labels = {id: row.label for id, row in rows.items() if row.label is not None}
    return rates(_flips([replace(rows[id], id=id) for id in labels]), labels)


def _unselected(sets: Sequence[RowSet]) -> dict[str, Any] | None:
    """Lost against gained over the rows that were not chosen by what the model answered before."""
    table = [flip for own in sets if own.kind in ("task", "external") for flip in _flips(own.rows)]
    if not table:
        return None
    counts = Counter(flip.kind for flip in table)
    return {
        "rows": len(table),
        "lost": counts["lost"],
        "gained": counts["gained"],
        "mcnemar_p": mcnemar(counts["lost"], counts["gained"]),
    }


def _met(rate: Rate | None, at_least: float) -> dict[str, Any]:
    """A figure without rows to measure it on meets nothing."""
    bound = rate.interval()[0] / 100 if rate else None
    return {"bound": bound, "met": bound is not None and bound >= at_least}


def _preservation(cost: Mapping[str, float]) -> float | None:
    """What preserving cost, as a percentage of what training cost."""
    training = cost.get("training_flops")
    return 100 * cost["preservation_flops"] / training if training and "preservation_flops" in cost else None
