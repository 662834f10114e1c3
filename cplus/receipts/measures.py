"""The figures of a receipt, all from its rows: shares with Wilson bounds, exact McNemar, losses, states, labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cplus.evaluation import requirements, rewording
from cplus.evaluation.letters import acquisition_by_label, macro, retention_by_label
from cplus.evaluation.requirements import new_parts, past_parts
from cplus.evaluation.retention_acquisition import Flip, Kind, acquisition, retention
from cplus.evaluation.rewording import State
from cplus.evaluation.statistics import Rate, mcnemar, share, weighted
from cplus.receipts.comparisons import differing, matched, unequal
from cplus.receipts.repaired import repaired

if TYPE_CHECKING:
    from cplus.receipts.contents import Receipt, RowComparison, RowSet

KINDS: tuple[Kind, ...] = ("kept", "lost", "gained", "still_wrong")
STATES: tuple[State, ...] = ("same", "reworded", "changed")
MATERIAL = 0.02
"""The smallest rise of the past loss called damage where no noise floor was measured, in nats per token."""
LARGE = 0.1
"""A larger rise is damage whatever the noise floor: a few rows give a wide one."""


def figures(receipt: Receipt) -> dict[str, Any]:
    """Every figure of the page, as plain values; percentages are 0-100, intervals 95 %, losses means over tokens."""
    sets = receipt.sets
    judged = [own for own in sets if own.judged]
    past, new = past_parts(judged), new_parts(judged)
    held_out = [own for own in judged if own.kind == "validation"]
    found: dict[str, Any] = {
        "retention": _row(_retained(_pooled(past))),
        "acquisition": _row(_acquired(_pooled(new))),
        "validation": _row(_acquired(_pooled(held_out))),
        "on_anchors": bool(past) and all(own.anchors for own in past),
        "free": _free(sets, receipt.noise_floor),
        "noise_floor": receipt.noise_floor,
        "sets": [_set(own, receipt.noise_floor) for own in sets],
        "labels": _labels(past, new),
        "unselected": _unselected(sets),
        "matched": matched(receipt),
        "differing": differing(receipt),
        "unequal": unequal(receipt),
        "preservation_percent": _preservation(receipt.cost),
    }
    if receipt.repair is not None:
        found["repair"] = repaired(receipt.repair, found["sets"])
    found["requirements"] = [requirements.judged(one, found) for one in receipt.requirements]
    return found


def state(row: RowComparison, noise_floor: float | None) -> State:
    """Whether a free-text answer stayed the same, was reworded or changed."""
    return rewording.state(
        row.before,
        row.after,
        loss_before=row.answer_nll_before,
        loss_after=row.answer_nll_after,
        noise_floor=noise_floor,
    )


def _flips(own: RowSet) -> list[Flip]:
    """The outcomes of a set; free text without a judge has none."""
    return [
        Flip(
            id=row.id,
            kind=row.kind,
            before=row.before,
            after=row.after,
            confidence_before=row.confidence_before,
            confidence_after=row.confidence_after,
        )
        for row in own.rows
        if own.judged and row.kind is not None
    ]


def _pooled(sets: Sequence[RowSet]) -> list[Flip]:
    return [flip for own in sets for flip in _flips(own)]


def _row(rate: Rate | None) -> dict[str, Any] | None:
    return None if rate is None else rate.row()


def _retained(table: Sequence[Flip]) -> Rate | None:
    return retention(table) if any(flip.kind in ("kept", "lost") for flip in table) else None


def _acquired(table: Sequence[Flip]) -> Rate | None:
    return acquisition(table) if any(flip.kind in ("gained", "still_wrong") for flip in table) else None


def _set(own: RowSet, noise_floor: float | None) -> dict[str, Any]:
    table = _flips(own)
    counts = Counter(flip.kind for flip in table)
    kept, learned = _retained(table), _acquired(table)
    return {
        "name": own.name,
        "kind": own.kind,
        "interface": own.interface,
        "judge": own.judge if own.judged and own.interface == "freeform" else None,
        "anchors": own.anchors,
        "rows": len(own.rows),
        "counts": {kind: counts[kind] for kind in KINDS} | {"unjudged": len(own.rows) - len(table)},
        "answers": _states(own.rows, noise_floor) if own.followed else None,
        "before": share(flip.kind in ("kept", "lost") for flip in table).row() if table else None,
        "after": share(flip.kind in ("kept", "gained") for flip in table).row() if table else None,
        "retention": _row(kept),
        "acquisition": _row(learned),
        # Rows chosen because they were right (or wrong) before can only change one way: the test would mean nothing.
        "mcnemar_p": mcnemar(counts["lost"], counts["gained"]) if kept and learned else None,
        "nll": _losses(own.rows),
    }


def _states(rows: Sequence[RowComparison], noise_floor: float | None) -> dict[str, int]:
    counts = Counter(state(row, noise_floor) for row in rows)
    return {name: counts[name] for name in STATES}


def _free(sets: Sequence[RowSet], noise_floor: float | None) -> dict[str, Any]:
    """Past, new and held-out new rows in free text that no judge was chosen for: losses, and what became of answers."""
    spoken = [own for own in sets if not own.judged]
    held_out = [own for own in spoken if own.kind == "validation"]
    parts = {"past": past_parts(spoken), "new": new_parts(spoken), "validation": held_out}
    return {name: _part(own, noise_floor) if own else None for name, own in parts.items()}


def _part(sets: Sequence[RowSet], noise_floor: float | None) -> dict[str, Any]:
    rows = [row for own in sets for row in own.rows]
    loss = _losses(rows)
    return {
        "rows": len(rows),
        "whole_task": all(own.kind == "task" for own in sets),
        "on_anchors": all(own.anchors for own in sets),
        "answers": _states(rows, noise_floor) if all(own.followed for own in sets) else None,
        "loss": loss,
        "effect": effect(loss, noise_floor),
    }


def effect(loss: Mapping[str, Any] | None, noise_floor: float | None) -> str:
    """What the loss says about behaviour that was to be kept.

    `damaged`: the interval of the rise excludes 0, and the rise exceeds the noise floor (`MATERIAL` where none was
    measured, at most `LARGE`). `slight`: the interval excludes 0, but the rise is within the floor. `unclear`: the
    interval holds 0 and reaches beyond the floor, or one row gives no interval. `kept`: the whole interval is below
    the floor. `unmeasured`: no row has a loss.
    """
    floor = MATERIAL if noise_floor is None else min(noise_floor, LARGE)
    if loss is None:
        return "unmeasured"
    if loss["low"] is None:
        return "unclear"
    if loss["low"] > 0:
        return "damaged" if loss["rise"] > floor else "slight"
    return "kept" if loss["high"] <= floor else "unclear"


def _losses(rows: Sequence[RowComparison]) -> dict[str, Any] | None:
    """The given responses' loss before and after and its rise, all means over tokens; the intervals are over rows."""
    known = [
        (row.tokens, row.nll_before, row.nll_after)
        for row in rows
        if row.tokens is not None and row.nll_before is not None and row.nll_after is not None
    ]
    if not known:
        return None
    tokens = [count for count, _, _ in known]
    rise = weighted([after - before for _, before, after in known], tokens)
    after = weighted([after for _, _, after in known], tokens)
    low, high = rise.interval or (None, None)
    return {
        "before": weighted([before for _, before, _ in known], tokens).mean,
        "after": after.mean,
        "after_high": after.interval[1] if after.interval else None,
        "rise": rise.mean,
        "low": low,
        "high": high,
        "rows": len(known),
        "tokens": sum(tokens),
    }


def _labels(past: Sequence[RowSet], new: Sequence[RowSet]) -> dict[str, Any] | None:
    """Retention and Acquisition per label and their unweighted means, where rows have labels."""
    kept = _by_label(past, retention_by_label)
    learned = _by_label(new, acquisition_by_label)
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
    sets: Sequence[RowSet], rates: Callable[[Sequence[Flip], Mapping[str, str]], dict[str, Rate]]
) -> dict[str, Rate]:
    table: list[Flip] = []
    labels: dict[str, str] = {}
    for own in sets:
        known = {row.id: row.label for row in own.rows if row.label is not None}
        # Two sets may hold rows of one id, so a row is named by its set too.
        table += [replace(flip, id=f"{own.name}/{flip.id}") for flip in _flips(own) if flip.id in known]
        labels |= {f"{own.name}/{id}": label for id, label in known.items()}
    return rates(table, labels)


def _unselected(sets: Sequence[RowSet]) -> dict[str, Any] | None:
    """Lost against gained over the rows that were not chosen by what the model answered before."""
    table = _pooled([own for own in sets if own.kind in ("task", "external")])
    if not table:
        return None
    counts = Counter(flip.kind for flip in table)
    return {
        "rows": len(table),
        "lost": counts["lost"],
        "gained": counts["gained"],
        "mcnemar_p": mcnemar(counts["lost"], counts["gained"]),
    }


def _preservation(cost: Mapping[str, float]) -> float | None:
    """What preserving cost, as a percentage of what training cost."""
    training = cost.get("training_flops")
    return 100 * cost["preservation_flops"] / training if training and "preservation_flops" in cost else None
