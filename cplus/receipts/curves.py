"""Learning curves as the lines, ticks and words of the page's charts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from typing import TYPE_CHECKING, TypeAlias

from cplus.plotting import COLOURS, OTHER, label
from cplus.receipts.comparisons import runs, unequal

if TYPE_CHECKING:
    from cplus.receipts.contents import Point, Receipt

Series: TypeAlias = Mapping[str, list[tuple[float, float]]]

WIDTH, HEIGHT = 340.0, 210.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 42.0, 12.0, 8.0, 34.0
_DASHES = ("6 3", "2 2", "9 3 2 3", "1 3", "12 4")
_TRAINED, _HELD_OUT = "rows trained on", "rows held out"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line in coordinates of the drawing; only the run's own is solid, so colour is not the only sign."""

    label: str
    colour: str
    dash: str | None
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a template draws: lines and ticks in coordinates of the drawing, and words.

    `caveat` says why the lines are not comparable as they are; an axis that does not begin at 0 is marked as cut.
    """

    title: str
    caveat: str
    x_label: str
    x_cut: bool
    y_cut: bool
    summary: str
    lines: tuple[Line, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


def charts(receipt: Receipt) -> list[Chart]:
    """One chart for each quantity that has at least two points.

    The past loss comes first and is drawn against the new loss, and Retention of several runs against Acquisition, so
    that methods are compared where they have learned equally well. Lines of runs at unequal rates or of unequal
    learning have a caveat.
    """
    caveat = "; ".join(dict.fromkeys(said.partition(":")[0] for said in unequal(receipt)))
    drawn = []
    for title, x_label, series in _quantities(receipt):
        known = {name: points for name, points in series.items() if len(points) > 1}
        if known:
            beside = len(known) > 1 and _HELD_OUT not in known
            drawn.append(_chart(title, x_label, known, list(series), caveat if beside else ""))
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


def _quantities(receipt: Receipt) -> Iterator[tuple[str, str, Series]]:
    """Each chart's title, the name of its horizontal axis, and its lines by method."""
    methods = runs(receipt)
    yield (
        "Rise of the past loss against the new loss",
        "new loss, nats per token (learning goes left)",
        {name: _losses(points) for name, points in methods.items()},
    )
    if len(methods) > 1:
        yield (
            "Retention (%) against Acquisition",
            "Acquisition, % (learning goes right)",
            {name: _shares(points) for name, points in methods.items()},
        )
    own, shown = receipt.curve, set()
    for title, trained, unseen in (
        ("New loss", "new_nll", "validation_nll"),
        ("Acquisition (%)", "acquisition", "validation"),
    ):
        if any(getattr(point, unseen) is not None for point in own):
            apart = {_TRAINED: _by_epoch(own, trained), _HELD_OUT: _by_epoch(own, unseen)}
            yield f"{title}: trained on and held out", "epoch", apart
            shown.add(title)
    epochs = (
        ("Retention (%)", "retention"),
        ("Acquisition (%)", "acquisition"),
        ("Divergence from the base model on new rows, nats per token", "divergence"),
        ("Training loss", "loss"),
    )
    for title, quantity in epochs:
        if title in shown and len(methods) == 1:
            continue  # the same line again
        yield title, "epoch", {name: _by_epoch(points, quantity) for name, points in methods.items()}


def _losses(points: Sequence[Point]) -> list[tuple[float, float]]:
    known = [(p.new_nll, p.past_nll) for p in points if p.new_nll is not None and p.past_nll is not None]
    return [(new, past - known[0][1]) for new, past in known] if points[0].epoch == 0 else []


def _shares(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(p.acquisition, p.retention) for p in points if p.acquisition is not None and p.retention is not None]


def _by_epoch(points: Sequence[Point], quantity: str) -> list[tuple[float, float]]:
    return [(p.epoch, getattr(p, quantity)) for p in points if getattr(p, quantity) is not None]


def _chart(title: str, x_label: str, series: Series, order: list[str], caveat: str) -> Chart:
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    x_values = ticks(min(xs), max(xs))
    # A line that stays at 100 % needs an axis that does not go beyond it.
    y_values = ticks(min(*ys, 90.0), 100.0, most=4) if "(%)" in title else ticks(min(ys), max(ys), most=4)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_values[0]) / (x_values[-1] - x_values[0])
        up = (y - y_values[0]) / (y_values[-1] - y_values[0])
        return (
            round(_LEFT + across * (WIDTH - _LEFT - _RIGHT), 1),
            round(HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM), 1),
        )

    dashes = dict(zip(order, chain((None,), cycle(_DASHES)), strict=False))
    lines = tuple(
        Line(
            label=label(name),
            colour=COLOURS["cplus"] if name == _TRAINED else COLOURS.get(name, OTHER),
            dash=dashes[name],
            points=tuple(place(x, y) for x, y in points),
        )
        for name, points in series.items()
    )
    ends = "; ".join(f"{label(name)} from {points[0][1]:.4g} to {points[-1][1]:.4g}" for name, points in series.items())
    return Chart(
        title=title,
        caveat=caveat,
        x_label=x_label,
        x_cut=x_values[0] > 0,
        y_cut=y_values[0] > 0,
        summary=f"{title}{f' ({caveat})' if caveat else ''} by {x_label}: {ends}",
        lines=lines,
        x_ticks=tuple((place(x, y_values[0])[0], f"{x:g}") for x in x_values),
        y_ticks=tuple((place(x_values[0], y)[1], f"{y:g}") for y in y_values),
    )
