"""Runs beside this one: past loss at equal learning, settings that differ, and what makes them incomparable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cplus.evaluation.matched import common_level, rise
from cplus.plotting import COLOURS, label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cplus.receipts.contents import Point, Receipt

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
        said.append(
            "unequal learning rates: " + ", ".join(f"{label(one['method'])} {_short(one['value'])}" for one in rates)
        )
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


def _short(number: str) -> str:
    try:
        return f"{float(number):g}"
    except ValueError:
        return number
