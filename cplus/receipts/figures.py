"""The figures of a receipt, computed once from its rows: everything that the page and the verdict say in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cplus.base.files import replacing
from cplus.evaluation import requirements
from cplus.evaluation.abilities import (
    ABILITIES,
    STOPPING,
    STOPPING_NOISE,
    Line,
    least,
    line,
    overall,
)
from cplus.evaluation.changes import Kind
from cplus.evaluation.judges import as_given, how_compared
from cplus.evaluation.requirements import new_parts, past_parts
from cplus.evaluation.statistics import Rate, RateRow, mcnemar, share, weighted

if TYPE_CHECKING:
    from cplus.receipts.contents import Point, Receipt, Repair, RowComparison, RowSet


KINDS: tuple[Kind, ...] = ("kept", "lost", "gained", "still_wrong")
State: TypeAlias = Literal["same", "changed"]
RISEN = 0.01
"""A held-out loss this much above its lowest, in nats per token, has risen again."""


Figures: TypeAlias = dict[str, Any]
"""Every figure of a record; percentages are 0-100, intervals 95 %, losses means over tokens with intervals over rows.

A figure of one set of rows is in `sets`, by the set's name; the others are over the sets of one kind. `verdict` is that
of all `lines`.
"""


def figures(receipt: Receipt) -> Figures:
    """Compare before and after: of a job, a repair, a check or any two models."""
    sets, beside = receipt.sets, receipt.beside
    judged = [own for own in sets if own.judged]
    free = [own for own in sets if not own.judged]
    past, new = past_parts(judged), new_parts(judged)
    parts = {"past": past_parts(free), "new": new_parts(free), "validation": _held_out(free)}
    lines = ability_lines(sets)
    found: Figures = {
        "verdict": overall(lines),
        "lines": lines,
        "learned": None,
        "retention": _rate(_kinds(*past), "kept", "lost"),
        "acquisition": _rate(_kinds(*new), "gained", "still_wrong"),
        "validation": _rate(_kinds(*_held_out(judged)), "gained", "still_wrong"),
        "on_anchors": bool(past) and all(own.anchors for own in past),
        "free": {name: _free(own) if own else None for name, own in parts.items()},
        "divergence": None if receipt.divergence is None else vars(receipt.divergence).copy(),
        "beside": None,
        "sets": [_set(own) for own in sets],
        "preservation_percent": None,
        "requirements": [],
    }
    found["learned"] = _learned(receipt, found)
    if (training := receipt.cost.get("training_flops")) and "preservation_flops" in receipt.cost:
        found["preservation_percent"] = 100 * receipt.cost["preservation_flops"] / training
    if beside is not None:
        other = [own for own in beside.sets if own.kind == "acquisition" and not own.judged]
        found["beside"] = {
            **{name: getattr(beside, name) for name in ("method", "level", "reached", "updates", "seconds")},
            "lines": ability_lines(beside.sets),
            "given": _as_given(other[0].rows) if other else None,
            "acquisition": _rate(_kinds(*new_parts(beside.sets)), "gained", "still_wrong"),
            "divergence": None if beside.divergence is None else beside.divergence.after,
        }
    if receipt.repair is not None:
        found["repair"] = repaired(receipt.repair, found["sets"])
    found["requirements"] = [requirements.judged(one, found) for one in receipt.requirements]
    return found


# What was kept: one line per ability, and one for answers that end. What was learned: of the new rows.


def ability_lines(sets: Sequence[RowSet]) -> list[Line]:
    """The lines of the verdict; the level of each test is corrected for the number that the base model can show."""
    own = [each for each in sets if each.kind == "ability"]
    ended = [(r.id, r.ended_before, r.ended_after) for each in own for r in each.rows if r.ended_before is not None]
    rows = {
        each.name: [(r.id, r.kind in ("kept", "lost"), r.kind in ("kept", "gained")) for r in each.rows] for each in own
    }
    if ended:
        rows[STOPPING] = [(id, bool(before), bool(after)) for id, before, after in ended]
    shown = [name for name, each in rows.items() if sum(before for _, before, _ in each) >= least(name, len(each))]
    noise = {name: ABILITIES[name].noise if name in ABILITIES else STOPPING_NOISE for name in rows}
    return [line(name, each, noise=noise[name], lines=max(1, len(shown))) for name, each in rows.items()]


def _as_given(rows: Sequence[RowComparison]) -> dict[str, Any] | None:
    """Answers to the rows trained on that are as given; None where none was asked for."""
    asked = [(row.after, row.gold) for row in rows if row.after is not None]
    if not asked:
        return None
    how = how_compared([gold for _, gold in asked])
    right = 0 if how == "loss" else sum(as_given(after, gold, how) for after, gold in asked)
    return {"how": how, "right": right, "rows": len(asked)}


def _learned(receipt: Receipt, found: Figures) -> dict[str, Any] | None:
    """Nothing was learned where no new answer became right and no loss of new rows fell; None without such rows."""
    trained = [own for own in receipt.sets if own.kind == "acquisition"]
    if not trained or receipt.repair is not None:
        return None
    given = _as_given([row for own in trained if not own.judged for row in own.rows])
    rates = [rate["right"] for rate in (found["acquisition"], found["validation"]) if rate]
    losses = [part["loss"] for part in (found["free"]["new"], found["free"]["validation"]) if part and part["loss"]]
    # A loss fell if it fell by more than chance explains.
    ends = [loss["rise"] if loss["high"] is None else loss["high"] for loss in losses]
    some = any(rates) or bool(given and given["right"]) or any(end < 0 for end in ends)
    return {
        "nothing": bool(rates or losses or given) and not some,
        "given": given,
        "memorising": memorising(receipt.curve),
    }


def memorising(curve: Sequence[Point]) -> int | None:
    """The first epoch of a rise of the held-out loss that lasts to the end, while the trained loss fell further."""
    known = [(point.epoch, point.validation_nll, point.new_nll) for point in curve if point.validation_nll is not None]
    if len(known) < 3:
        return None
    lowest = min(range(len(known)), key=lambda place: known[place][1] or 0.0)
    rest = known[lowest:]
    (_, least, trained), (_, last, fallen) = rest[0], rest[-1]
    if len(rest) < 2 or trained is None or fallen is None or fallen >= trained or (last or 0) < (least or 0) + RISEN:
        return None
    return int(rest[1][0])


def state(row: RowComparison) -> State | None:
    """Whether a free-text answer stayed the same, up to case and blanks; None where the model was not asked twice."""
    if row.before is None or row.after is None:
        return None
    return "same" if row.before.casefold().split() == row.after.casefold().split() else "changed"


def _held_out(sets: Sequence[RowSet]) -> list[RowSet]:
    return [own for own in sets if own.kind == "validation"]


def _kinds(*sets: RowSet) -> list[Kind]:
    """The outcomes of sets; free text without a judge has none."""
    return [row.kind for own in sets if own.judged for row in own.rows if row.kind is not None]


def _rate(kinds: Sequence[Kind], right: Kind, wrong: Kind) -> RateRow | None:
    counts = Counter(kinds)
    total = counts[right] + counts[wrong]
    return Rate(counts[right], total).row() if total else None


def _set(own: RowSet) -> dict[str, Any]:
    kinds = _kinds(own)
    counts = Counter(kinds)
    kept, learned = _rate(kinds, "kept", "lost"), _rate(kinds, "gained", "still_wrong")
    followed = not own.judged and own.kind not in ("acquisition", "validation")
    states = Counter(filter(None, map(state, own.rows)) if followed else ())
    return {
        "name": own.name,
        "kind": own.kind,
        "interface": own.interface,
        "judge": own.judge if own.judged and own.interface == "freeform" else None,
        "anchors": own.anchors,
        "rows": len(own.rows),
        "counts": {kind: counts[kind] for kind in KINDS} | {"unjudged": len(own.rows) - len(kinds)},
        "answers": {"same": states["same"], "changed": states["changed"]} if states else None,
        "before": share(kind in ("kept", "lost") for kind in kinds).row() if kinds else None,
        "after": share(kind in ("kept", "gained") for kind in kinds).row() if kinds else None,
        "retention": kept,
        "acquisition": learned,
        # Rows chosen because they were right (or wrong) before can only change one way: the test would mean nothing.
        "mcnemar_p": mcnemar(counts["lost"], counts["gained"]) if kept and learned else None,
        "nll": _losses(own.rows),
    }


def _free(sets: Sequence[RowSet]) -> dict[str, Any]:
    rows = [row for own in sets for row in own.rows]
    return {
        "rows": len(rows),
        "whole_task": all(own.kind == "task" for own in sets),
        "on_anchors": all(own.anchors for own in sets),
        "loss": _losses(rows),
    }


def _losses(rows: Sequence[RowComparison]) -> dict[str, Any] | None:
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


# Base, tuned and repaired model side by side.


def repaired(repair: Repair, sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a repair; those of base and repaired model come from the sets of the receipt.

    `helped` is whether every past figure is better than with the tuned model; None where nothing of it was measured.
    """
    tuned = {own.name: own for own in repair.sets}
    rows: list[dict[str, Any]] = []
    for own in sets:
        if (other := tuned.get(own["name"])) is None:
            continue
        kind, before = own["kind"], (own.get("before") or {}).get("percent")
        found: tuple[str, float | None, float | None, Any]
        if kind == "retention":
            found = ("Retention", 100.0, other.retention, own["retention"])
        elif kind in ("acquisition", "validation"):
            found = ("Acquisition", 0.0, other.acquisition, own["acquisition"])
        else:
            found = ("right answers", before, other.right, own["after"])
        values = [(*found[:3], found[3] and found[3]["percent"])]
        if own["nll"]:
            values.append(("loss", own["nll"]["before"], other.nll, own["nll"]["after"]))
        rows += [
            {"name": own["name"], "kind": kind, "quantity": quantity, "base": base, "tuned": middle, "repaired": after}
            for quantity, base, middle, after in values
            if middle is not None and after is not None
        ]
    better = [
        row["repaired"] < row["tuned"] if row["quantity"] == "loss" else row["repaired"] > row["tuned"]
        for row in rows
        if row["kind"] == "retention"
    ]
    return {
        "undone": repair.undone,
        "moved": repair.moved,
        "percent": 100 * repair.undone / repair.moved,
        "rows": rows,
        "helped": all(better) if better else None,
    }


def shown(row: Mapping[str, Any], value: float) -> str:
    """A value of a row with its unit.

    >>> shown({"quantity": "Retention"}, 57.25), shown({"quantity": "loss"}, 0.67)
    ('57.2\xa0%', '0.670')
    """
    return f"{value:.3f}" if row["quantity"] == "loss" else f"{value:.1f}\u00a0%"


# Figures of a page.


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as names with points and texts.

    >>> flat({"lr": 1e-06, "bank": {"seed": 0, "topics": []}, "lora": None})
    [('lr', '1e-06'), ('bank.seed', '0'), ('bank.topics', 'none'), ('lora', 'none')]
    """
    pairs = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            pairs += flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            pairs.append((prefix + name, ", ".join(map(str, value)) or "none"))
        else:
            pairs.append((prefix + name, "none" if value is None else str(value)))
    return pairs


# Figures from records; the palette is the paper's and is safe for colour-blind readers.


COLOURS = {
    "sft": "#666666",
    "replay": "#CC79A7",
    "probe-replay": "#E69F00",
    "anchor-probe-replay": "#D55E00",
    "cpl": "#009E73",
    "cplus": "#0072B2",
}
OTHER = "#56B4E9"
LABELS = {"sft": "SFT", "replay": "Replay", "cpl": "CPL", "cplus": "CPLUS"}


def label(method: str) -> str:
    """A method's name in figures and tables."""
    return LABELS.get(method, method)


def save(figure: Any, stem: Path) -> list[Path]:
    """Write SVG and PNG, the same bytes for the same figure."""
    paths = []
    for suffix, metadata in ((".svg", {"Date": None}), (".png", {"Software": None})):
        path = stem.with_suffix(suffix)
        with replacing(path) as part:
            figure.savefig(part, format=suffix[1:], dpi=150, bbox_inches="tight", metadata=metadata)
        paths.append(path)
    return paths
