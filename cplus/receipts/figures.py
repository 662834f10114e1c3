"""The figures of a receipt, computed once from its rows: everything that the page and the verdict say in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypeAlias, TypedDict

from cplus.base.files import replacing
from cplus.evaluation import requirements
from cplus.evaluation.changes import Kind, macro, rates
from cplus.evaluation.requirements import new_parts, past_parts
from cplus.evaluation.statistics import Rate, RateRow, common_level, mcnemar, rise, share, weighted

if TYPE_CHECKING:
    from cplus.receipts.contents import Point, Receipt, Repair, RowComparison, RowSet, TunedSet


KINDS: tuple[Kind, ...] = ("kept", "lost", "gained", "still_wrong")
State: TypeAlias = Literal["same", "changed"]
MATERIAL = 0.02
"""The smallest rise of the past loss called damage where no noise floor was measured, in nats per token."""
LARGE = 0.1
"""A larger rise is damage whatever the noise floor: a few rows give a wide one."""


class Losses(TypedDict):
    """The given responses' loss before and after and its rise, all means over tokens; the intervals are over rows."""

    before: float
    after: float
    after_high: float | None
    rise: float
    low: float | None
    high: float | None
    rows: int
    tokens: int


class SetFigures(TypedDict):
    """One named set of rows: outcomes where answers are judged, losses where they are free text."""

    name: str
    kind: str
    interface: str
    judge: str | None
    anchors: bool
    rows: int
    counts: dict[str, int]
    answers: dict[State, int] | None
    before: RateRow | None
    after: RateRow | None
    retention: RateRow | None
    acquisition: RateRow | None
    mcnemar_p: float | None
    nll: Losses | None


class FreeText(TypedDict):
    """Rows in free text that no judge was chosen for: their loss, and what became of the answers."""

    rows: int
    whole_task: bool
    on_anchors: bool
    answers: dict[State, int] | None
    loss: Losses | None
    effect: str


class Figures(TypedDict):
    """Every figure of a record; percentages are 0-100, intervals 95 %, losses means over tokens.

    A figure of one set of rows is in `sets`, by the set's name; the others are over the sets of one kind.
    """

    retention: RateRow | None
    acquisition: RateRow | None
    validation: RateRow | None
    on_anchors: bool
    free: dict[str, FreeText | None]
    noise_floor: float | None
    sets: list[SetFigures]
    labels: dict[str, Any] | None
    unselected: dict[str, Any] | None
    matched: dict[str, Any] | None
    differing: list[dict[str, Any]]
    unequal: list[str]
    preservation_percent: float | None
    repair: NotRequired[dict[str, Any]]
    requirements: list[dict[str, Any]]


def figures(receipt: Receipt) -> Figures:
    """Compare before and after: of a job, a repair, a check or any two models."""
    sets = receipt.sets
    judged = [own for own in sets if own.judged]
    free = [own for own in sets if not own.judged]
    past, new = past_parts(judged), new_parts(judged)
    parts = {"past": past_parts(free), "new": new_parts(free), "validation": _held_out(free)}
    found: Figures = {
        "retention": _rate(_kinds(*past), "kept", "lost"),
        "acquisition": _rate(_kinds(*new), "gained", "still_wrong"),
        "validation": _rate(_kinds(*_held_out(judged)), "gained", "still_wrong"),
        "on_anchors": bool(past) and all(own.anchors for own in past),
        "free": {name: _free(own, receipt.noise_floor) if own else None for name, own in parts.items()},
        "noise_floor": receipt.noise_floor,
        "sets": [_set(own) for own in sets],
        "labels": _labels(past, new),
        "unselected": _unselected(_kinds(*(own for own in sets if own.kind in ("task", "external")))),
        "matched": matched(receipt),
        "differing": differing(receipt),
        "unequal": unequal(receipt),
        "preservation_percent": _preservation(receipt.cost),
        "requirements": [],
    }
    if receipt.repair is not None:
        found["repair"] = repaired(receipt.repair, found["sets"])
    found["requirements"] = [requirements.judged(one, found) for one in receipt.requirements]
    return found


def state(row: RowComparison) -> State:
    """Whether a free-text answer stayed the same, up to case and blanks, or changed; the loss says by how much."""
    before, after = (text.casefold().split() for text in (row.before, row.after))
    return "same" if before == after else "changed"


def _held_out(sets: Sequence[RowSet]) -> list[RowSet]:
    return [own for own in sets if own.kind == "validation"]


def _kinds(*sets: RowSet) -> list[Kind]:
    """The outcomes of sets; free text without a judge has none."""
    return [row.kind for own in sets if own.judged for row in own.rows if row.kind is not None]


def _rate(kinds: Sequence[Kind], right: Kind, wrong: Kind) -> RateRow | None:
    counts = Counter(kinds)
    total = counts[right] + counts[wrong]
    return Rate(counts[right], total).row() if total else None


def _set(own: RowSet) -> SetFigures:
    kinds = _kinds(own)
    counts = Counter(kinds)
    kept, learned = _rate(kinds, "kept", "lost"), _rate(kinds, "gained", "still_wrong")
    return {
        "name": own.name,
        "kind": own.kind,
        "interface": own.interface,
        "judge": own.judge if own.judged and own.interface == "freeform" else None,
        "anchors": own.anchors,
        "rows": len(own.rows),
        "counts": {kind: counts[kind] for kind in KINDS} | {"unjudged": len(own.rows) - len(kinds)},
        "answers": _states(own.rows) if own.followed else None,
        "before": share(kind in ("kept", "lost") for kind in kinds).row() if kinds else None,
        "after": share(kind in ("kept", "gained") for kind in kinds).row() if kinds else None,
        "retention": kept,
        "acquisition": learned,
        # Rows chosen because they were right (or wrong) before can only change one way: the test would mean nothing.
        "mcnemar_p": mcnemar(counts["lost"], counts["gained"]) if kept and learned else None,
        "nll": _losses(own.rows),
    }


def _states(rows: Sequence[RowComparison]) -> dict[State, int]:
    counts = Counter(map(state, rows))
    return {"same": counts["same"], "changed": counts["changed"]}


def _free(sets: Sequence[RowSet], noise_floor: float | None) -> FreeText:
    rows = [row for own in sets for row in own.rows]
    loss = _losses(rows)
    return {
        "rows": len(rows),
        "whole_task": all(own.kind == "task" for own in sets),
        "on_anchors": all(own.anchors for own in sets),
        "answers": _states(rows) if all(own.followed for own in sets) else None,
        "loss": loss,
        "effect": effect(loss, noise_floor),
    }


def effect(loss: Losses | None, noise_floor: float | None) -> str:
    """What the loss says about behaviour that was to be kept.

    `damaged`: the interval of the rise excludes 0, and the rise exceeds the noise floor (`MATERIAL` where none was
    measured, at most `LARGE`). `slight`: the interval excludes 0, but the rise is within the floor. `unclear`: the
    interval holds 0 and reaches beyond the floor, or one row gives no interval. `kept`: the whole interval is below
    the floor. `unmeasured`: no row has a loss.
    """
    floor = MATERIAL if noise_floor is None else min(noise_floor, LARGE)
    if loss is None:
        return "unmeasured"
    if loss["low"] is None or loss["high"] is None:
        return "unclear"
    if loss["low"] > 0:
        return "damaged" if loss["rise"] > floor else "slight"
    return "kept" if loss["high"] <= floor else "unclear"


def _losses(rows: Sequence[RowComparison]) -> Losses | None:
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
    kept, learned = _by_label(past, "kept", "lost"), _by_label(new, "gained", "still_wrong")
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


def _by_label(sets: Sequence[RowSet], right: Kind, wrong: Kind) -> dict[str, Rate]:
    rows = (row for own in sets for row in own.rows if row.label is not None and row.kind in (right, wrong))
    return rates((str(row.label), row.kind == right) for row in rows)


def _unselected(kinds: Sequence[Kind]) -> dict[str, Any] | None:
    """Lost against gained over the rows that were not chosen by what the model answered before."""
    if not kinds:
        return None
    lost, gained = kinds.count("lost"), kinds.count("gained")
    return {"rows": len(kinds), "lost": lost, "gained": gained, "mcnemar_p": mcnemar(lost, gained)}


def _preservation(cost: Mapping[str, float]) -> float | None:
    """What preserving cost, as a percentage of what training cost."""
    training = cost.get("training_flops")
    return 100 * cost["preservation_flops"] / training if training and "preservation_flops" in cost else None


# Base, tuned and repaired model side by side.


def repaired(repair: Repair, sets: Sequence[SetFigures]) -> dict[str, Any]:
    """The figures of a repair; those of base and repaired model come from the sets of the receipt.

    `helped` is whether every past figure is better than with the tuned model; None where nothing of it was measured.
    """
    tuned = {own.name: own for own in repair.sets}
    rows = [row for own in sets if own["name"] in tuned for row in _rows(own, tuned[own["name"]])]
    past = [row for row in rows if row["kind"] == "retention"]
    better = [
        row["repaired"] < row["tuned"] if row["quantity"] == "loss" else row["repaired"] > row["tuned"] for row in past
    ]
    return {
        "undone": repair.undone,
        "moved": repair.moved,
        "percent": 100 * repair.undone / repair.moved,
        "rows": rows,
        "helped": all(better) if better else None,
    }


def _rows(own: SetFigures, tuned: TunedSet) -> Iterator[dict[str, Any]]:
    named = {"name": own["name"], "kind": own["kind"]}
    if own["kind"] == "retention" and own["retention"] and tuned.retention is not None:
        yield {**named, "quantity": "Retention", "base": 100.0, "tuned": tuned.retention,
               "repaired": own["retention"]["percent"]}  # fmt: skip
    elif own["kind"] in ("acquisition", "validation") and own["acquisition"] and tuned.acquisition is not None:
        yield {**named, "quantity": "Acquisition", "base": 0.0, "tuned": tuned.acquisition,
               "repaired": own["acquisition"]["percent"]}  # fmt: skip
    elif own["after"] and own["before"] and tuned.right is not None:
        yield {**named, "quantity": "right answers", "base": own["before"]["percent"], "tuned": tuned.right,
               "repaired": own["after"]["percent"]}  # fmt: skip
    if own["nll"] and tuned.nll is not None:
        yield {**named, "quantity": "loss", "base": own["nll"]["before"], "tuned": tuned.nll,
               "repaired": own["nll"]["after"]}  # fmt: skip


def shown(row: Mapping[str, Any], value: float) -> str:
    """A value of a row with its unit.

    >>> shown({"quantity": "Retention"}, 57.25), shown({"quantity": "loss"}, 0.67)
    ('57.2\xa0%', '0.670')
    """
    return f"{value:.3f}" if row["quantity"] == "loss" else f"{value:.1f}\u00a0%"


# Runs beside this one: past loss at equal learning, settings that differ, and what makes them incomparable.


LOSS_TOLERANCE = 0.05
"""Final new losses further apart than this, in nats per token, are unequal learning."""
SHARE_TOLERANCE = 2.0
"""Final Acquisitions further apart than this, in percentage points, are unequal learning."""
_OWN = ("method", "out", "compare", "report_to", "require")
"""Settings of a run's place and name; a comparison is not affected by them."""


def runs(receipt: Receipt) -> dict[str, Sequence[Point]]:
    """Each method's curve: the run's own first, then the others in a fixed order."""
    own: dict[str, Sequence[Point]] = {_own(receipt): receipt.curve} if receipt.curve else {}
    curves = {name: receipt.comparisons[name].curve for name in _others(receipt)}
    return own | {name: curve for name, curve in curves.items() if curve and name not in own}


def _own(receipt: Receipt) -> str:
    return receipt.method or "this run"


def _others(receipt: Receipt) -> list[str]:
    """The palette's order, because JSON does not keep that of its keys."""
    known = list(COLOURS)
    return sorted(receipt.comparisons, key=lambda name: (known.index(name) if name in known else len(known), name))


def matched(receipt: Receipt) -> dict[str, Any] | None:
    """The rise of each method's past loss where all have learned the new rows equally well.

    The loss on new rows is the lowest that every method reaches; each method's past loss is interpolated where its
    own curve first reaches it. `ratio` is the rise against SFT's; `own` names this run. None without two methods that
    know both losses.
    """
    known = {
        name: [(p.new_nll, p.past_nll) for p in points if p.new_nll is not None and p.past_nll is not None]
        for name, points in runs(receipt).items()
        if points[0].epoch == 0  # a rise counts from the model before
    }
    known = {name: points for name, points in known.items() if len(points) > 1}
    if len(known) < 2:
        return None
    level = common_level(known.values())
    rises = {name: rise(points, level) for name, points in known.items()}
    sft = rises.get("sft", 0.0)
    return {
        "own": _own(receipt) if _own(receipt) in known else None,
        "new_nll": level,
        "rows": [
            {"method": name, "rise": found, "ratio": found / sft if sft > 0 else None} for name, found in rises.items()
        ],
    }


def differing(receipt: Receipt) -> list[dict[str, Any]]:
    """Every setting that differs between the run and those beside it: its name, and each run's value as text.

    A run that recorded no settings is left out: nothing is known about it.
    """
    settings = {_own(receipt): receipt.settings} | {n: receipt.comparisons[n].settings for n in _others(receipt)}
    known = {name: dict(flat(own)) for name, own in settings.items() if own}
    names = sorted({name for own in known.values() for name in own if name not in _OWN})
    found = []
    for name in names:
        values = [{"method": method, "value": own.get(name, "not set")} for method, own in known.items()]
        if len({one["value"] for one in values}) > 1:
            found.append({"setting": name, "values": values})
    return found


def unequal(receipt: Receipt) -> list[str]:
    """In what the runs are not comparable: their learning rates, or how much they have learned."""
    said = []
    rates = next((one["values"] for one in differing(receipt) if one["setting"] == "lr"), None)
    if rates:
        listed = ", ".join(f"{label(one['method'])} {one['value']}" for one in rates)
        said.append(f"unequal learning rates: {listed}")
    ends = {name: points[-1] for name, points in runs(receipt).items()}
    for quantity, words, spread, tolerance in (
        ("new_nll", "final new loss", "{:.2f}", LOSS_TOLERANCE),
        ("acquisition", "final Acquisition", "{:.0f}\u00a0%", SHARE_TOLERANCE),
    ):
        values = {name: getattr(point, quantity) for name, point in ends.items()}
        values = {name: value for name, value in values.items() if value is not None}
        if len(values) > 1 and max(values.values()) - min(values.values()) > tolerance:
            listed = ", ".join(f"{label(name)} {spread.format(value)}" for name, value in values.items())
            said.append(f"unequal learning: {words} {listed}")
    return said


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
