"""Learning curves: methods compared at matched learning, and the lines of the page's charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any

from cplus.evaluation.matched import common_level, rise
from cplus.plotting import COLOURS, OTHER, label

if TYPE_CHECKING:
    from cplus.receipts.contents import Point, Receipt

WIDTH, HEIGHT = 340.0, 210.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 38.0, 12.0, 8.0, 34.0
_DASHES = ("6 3", "2 2", "9 3 2 3", "1 3", "12 4")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One method's line in places of the drawing; the run's own alone is not dashed: colour is no only sign."""

    label: str
    colour: str
    dash: str | None
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a template needs to draw: lines and ticks in places of the drawing, and words."""

    title: str
    x_label: str
    summary: str
    lines: tuple[Line, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


def matched(
    method: str | None, curve: Sequence[Point], comparisons: Mapping[str, Sequence[Point]]
) -> dict[str, Any] | None:
    """The past rows' loss of each method where all have learned the new rows equally well.

    The loss on new rows is the lowest that every method reaches; each method's past loss is interpolated where its
    own curve first reaches it. `ratio` is the rise against SFT's. None without two methods that know both losses.
    """
    known = {
        name: [(p.new_nll, p.past_nll) for p in points if p.new_nll is not None and p.past_nll is not None]
        for name, points in _methods(method, curve, comparisons).items()
        if points[0].epoch == 0  # a rise counts from the model before
    }
    known = {name: points for name, points in known.items() if len(points) > 1}
    if len(known) < 2:
        return None
    level = common_level(known.values())
    rises = {name: rise(points, level) for name, points in known.items()}
    sft = rises.get("sft", 0.0)
    return {
        "new_nll": level,
        "rows": [
            {"method": name, "rise": found, "ratio": found / sft if sft > 0 else None} for name, found in rises.items()
        ],
    }


def charts(receipt: Receipt) -> list[Chart]:
    """One chart for each thing that was followed over at least two epochs."""
    followed = (
        ("Retention (%)", "epoch", "epoch", "retention"),
        ("Acquisition (%)", "epoch", "epoch", "acquisition"),
        ("Training loss", "epoch", "epoch", "loss"),
        ("Past rows' loss against new rows' loss", "loss on new rows (learning goes left)", "new_nll", "past_nll"),
    )
    methods = _methods(receipt.method, receipt.curve, receipt.comparisons)
    dashes = dict(zip(methods, chain((None,), cycle(_DASHES)), strict=False))
    drawn = []
    for title, x_label, x, y in followed:
        series = {
            name: [(getattr(p, x), getattr(p, y)) for p in points if None not in (getattr(p, x), getattr(p, y))]
            for name, points in methods.items()
        }
        series = {name: points for name, points in series.items() if len(points) > 1}
        if series:
            drawn.append(_chart(title, x_label, series, dashes, percent=title.endswith("(%)")))
    return drawn


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`.

    >>> ticks(0.0, 9.3)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    width = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(width / most))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if width / (power * m) <= most)
    first = math.floor(low / step)
    last = math.ceil(round(high / step, 9))
    return [round(step * i, 10) for i in range(first, max(last, first + 1) + 1)]


def _methods(
    method: str | None, curve: Sequence[Point], comparisons: Mapping[str, Sequence[Point]]
) -> dict[str, Sequence[Point]]:
    """The run's own method first, the others in the palette's order: a record does not keep that of its keys."""
    own = {method or "this run": curve} if curve else {}
    known = list(COLOURS)
    others = sorted(comparisons, key=lambda name: (known.index(name) if name in known else len(known), name))
    return own | {name: comparisons[name] for name in others if comparisons[name] and name not in own}


def _chart(
    title: str,
    x_label: str,
    series: Mapping[str, list[tuple[float, float]]],
    dashes: Mapping[str, str | None],
    *,
    percent: bool,
) -> Chart:
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    x_values, y_values = ticks(min(xs), max(xs)), ticks(min(ys), 100.0 if percent else max(ys), most=4)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_values[0]) / (x_values[-1] - x_values[0])
        up = (y - y_values[0]) / (y_values[-1] - y_values[0])
        return (
            round(_LEFT + across * (WIDTH - _LEFT - _RIGHT), 1),
            round(HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM), 1),
        )

    lines = tuple(
        Line(
            label=label(name),
            colour=COLOURS.get(name, OTHER),
            dash=dashes[name],
            points=tuple(place(x, y) for x, y in points),
        )
        for name, points in series.items()
    )
    ends = "; ".join(f"{label(name)} from {points[0][1]:.4g} to {points[-1][1]:.4g}" for name, points in series.items())
    return Chart(
        title=title,
        x_label=x_label,
        summary=f"{title} by {x_label}: {ends}",
        lines=lines,
        x_ticks=tuple((place(x, y_values[0])[0], f"{x:g}") for x in x_values),
        y_ticks=tuple((place(x_values[0], y)[1], f"{y:g}") for y in y_values),
    )
