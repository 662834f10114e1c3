"""Drawing and tables that the studies share: panels, lines with standard errors, measured beside published numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from cplus.evaluation.statistics import Estimate
from cplus.lab.estimate import PARAMETERS
from cplus.lab.records import RunResult
from cplus.lab.study import ADDED_HERE, Cell, Collected, ComparisonLine, Picture, Table
from cplus.lab.summaries import Metric, over_seeds, pick, retained, shown, table
from cplus.receipts.figures import COLOURS, OTHER, label, save

INK, SOFT, LINE, CARD = "#1d2430", "#586372", "#e0e4ea", "#ffffff"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Methods differ in marker as well as in colour.
MARKERS = {"sft": "s", "replay": "^", "probe-replay": "v", "anchor-probe-replay": "D", "cpl": "P", "cplus": "o"}
FURTHER_STYLES = {
    "distillation": ("#56B4E9", "<"),
    "ssr": ("#D55E00", ">"),
    "agem": ("#8A6D00", "X"),
    "ogd": ("#5B3A8E", "h"),
}
NAMES = {
    "probe-replay": "Self-Probe Replay",
    "anchor-probe-replay": "Anchor + Probe Replay",
    "distillation": "Distillation",
    "ssr": "SSR",
    "agem": "A-GEM",
    "ogd": "OGD",
}
_STYLE = {
    "svg.hashsalt": "cplus",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": CARD,
    "axes.facecolor": CARD,
}
Points: TypeAlias = Sequence[tuple[float, Estimate]]


def method_name(method: str) -> str:
    """A method's name in figures and tables.

    >>> method_name("ssr"), method_name("cplus"), method_name("cplus-cvar")
    ('SSR', 'CPLUS', 'cplus-cvar')
    """
    return NAMES.get(method, label(method))


def colour_and_marker(method: str) -> tuple[str, str]:
    """A method's colour and marker."""
    return FURTHER_STYLES.get(method, (COLOURS.get(method, OTHER), MARKERS.get(method, "o")))


def panels(
    count: int,
    columns: int | None = None,
    *,
    width: float = 3.2,
    height: float = 2.6,
    share: Any = False,
    ylabel: str = "",
    **more: Any,
) -> Any:
    """A figure and its panels row by row, without global state; the first of each row has the label.

    `figure.estimates` are those of the lines drawn; the caption has the number of their seeds.
    """
    from matplotlib.figure import Figure

    columns = columns or count
    rows = -(-count // columns)
    figure: Any = Figure(figsize=(max(4.5, width * columns), height * rows + 0.35), layout="constrained")
    figure.estimates = []
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=share, **more).flat)
    for axis in axes:
        axis.grid(visible=True, axis="y")
    for axis in axes[::columns]:
        axis.set_ylabel(ylabel)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes[:count]


def picture(figure: Any, label: str, paper: str, caption: str, errors: str = "Means and standard errors") -> Picture:
    """The finished figure: empty panels are marked, one legend above all, the seeds in the caption."""
    found: dict[str, Any] = {}
    for axis in figure.axes:
        if axis.axison and not axis.has_data():
            axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", va="center", color=SOFT)
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    if found and not any(axis.get_legend() for axis in figure.axes):
        figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=min(len(found), 5))
    seeds = f" {errors}, {seed_count(figure.estimates)}." if errors else ""
    return Picture(label=label, paper=paper, caption=caption + seeds, figure=figure)


def line(axis: Any, points: Points, name: str | None, colour: str, marker: str, **more: Any) -> None:
    """One line with its standard errors; a single seed has none."""
    if points:
        across, found = [x for x, _ in points], [each for _, each in points]
        axis.figure.estimates += found
        errors = [each.error or 0.0 for each in found]
        look = {"label": name, "color": colour, "marker": marker, "capsize": 2, "markersize": 4.5, "linewidth": 1.5}
        axis.errorbar(across, [each.mean for each in found], yerr=errors, **{**look, **more})


def lines(axis: Any, series: Mapping[str, Points]) -> None:
    """One line per method, CPLUS drawn on top."""
    for method, points in series.items():
        line(axis, points, method_name(method), *colour_and_marker(method), zorder=3 if method == "cplus" else 2)


def points_by(results: Sequence[RunResult], field: str, metric: Metric = retained) -> Points:
    """A metric for each value of a field of the spec, in ascending order."""
    rows = table(results, (field,), {"value": metric})
    return sorted((row.at[field], row.figures["value"]) for row in rows if row.figures)


def by_budget(results: Sequence[RunResult], method: str) -> Points:
    """A method's Retention at each anchor budget."""
    return points_by(pick(results, method=method), "num_anchors")


def level_line(axis: Any, found: Estimate | None, method: str) -> None:
    """A method without an anchor budget: a horizontal line with its standard error as a band."""
    if found is not None:
        axis.figure.estimates.append(found)
        colour, _ = colour_and_marker(method)
        axis.axhline(found.mean, color=colour, linestyle="--", linewidth=1.3, label=method_name(method))
        if found.error:
            axis.axhspan(found.mean - found.error, found.mean + found.error, color=colour, alpha=0.15, linewidth=0)


def budget_axis(axis: Any, values: Iterable[int]) -> None:
    """A horizontal axis of anchor budgets in powers of two."""
    found = sorted(set(values))
    if found:
        axis.set_xscale("log", base=2)
        axis.set_xticks(found, [str(value) for value in found])
        axis.set_xticks([], minor=True)
    axis.set_xlabel("anchors A (rows)")


def heat_map(axis: Any, values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str]) -> Any:
    """Shares from 0 to 1 as colours, with their numbers where there is room."""
    axis.grid(visible=False)
    image = axis.imshow(values, vmin=0.0, vmax=1.0, cmap="viridis", aspect="auto", interpolation="nearest")
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xticks(range(len(columns)), columns)
    if len(rows) * len(values[0]) <= 80:
        for y, own in enumerate(values):
            for x, value in enumerate(own):
                colour = "#000000" if value > 0.6 else "#fefefe"  # not pure white, which the page replaces in dark mode
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=colour)
    return image


def model_size(model: str) -> float:
    """The number of a model's parameters, as a sort key; unknown models come first.

    >>> sorted(["qwen3-4b", "toy", "toy-s"], key=model_size)
    ['toy-s', 'toy', 'qwen3-4b']
    """
    return PARAMETERS.get(model, 0.0)


def seed_count(found: Iterable[Estimate | None]) -> str:
    """The number of seeds behind some estimates.

    >>> seed_count([Estimate(1.0, 0.1, 5), Estimate(2.0, 0.1, 3), None]), seed_count([])
    ('n = 3 to 5 seeds', 'not run')
    """
    counts = sorted({each.count for each in found if each is not None})
    if not counts:
        return "not run"
    span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"n = {span} {'seed' if counts == [1] else 'seeds'}"


def inline_svg(svg: str, name: str) -> str:
    """An SVG for a page: no prolog, unique ids, and the page's colour variables, so that dark mode applies to it."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'href="#', f'href="#{name}-', body)
    body = body.replace("url(#", f"url(#{name}-")
    opening, rest = body.split(">", 1)
    width = re.search(r'viewBox="0 0 ([\d.]+)', opening)
    size = f' style="--wide: {1.55 * float(width[1]):.0f}px"' if width else ""
    body = re.sub(r'\s(width|height)="[^"]*"', "", opening) + size + ">" + rest
    inks = {INK: "--ink", SOFT: "--soft", LINE: "--line", CARD: "--card"}
    inks |= {colour.lower(): f"--{method}" for method, colour in COLOURS.items()} | {"#56b4e9": "--other"}
    for colour, variable in inks.items():
        body = body.replace(f": {colour}", f": var({variable})")
    return body


# Tables and comparison lines: each measured number with the published one.


def cell(found: Estimate | None, published: Any = None) -> Cell:
    """A measured number with its standard error; the published one may have a standard error too.

    >>> cell(Estimate(83.26, 0.71, 5), (82.32, 0.64))
    Cell(measured='83.3 ± 0.7', published='82.32 ± 0.64')
    """
    if isinstance(published, tuple):
        return Cell(measured=shown(found), published=" ± ".join(f"{value:.2f}" for value in published))
    return Cell(measured=shown(found), published=None if published is None else f"{published:.2f}")


Row: TypeAlias = tuple[tuple[str, ...], Sequence[Estimate | None], Sequence[Any]]
"""A row of a table: its names, the measured numbers, and the published ones."""


def rows_by_method(
    results: Sequence[RunResult],
    names: Mapping[str, tuple[str, ...]],
    metrics: Sequence[Metric],
    published: Mapping[str, Sequence[Any]],
) -> list[Row]:
    """One row per method with these metrics."""
    found = {method: pick(results, method=method) for method in names}
    return [(names[m], [over_seeds(own, metric) for metric in metrics], published[m]) for m, own in found.items()]


def measured_table(
    label: str, paper: str, columns: tuple[str, ...], rows: Iterable[Row], caption: str, remark: str
) -> Table:
    """A table of measured numbers with the published ones; its caption has the number of seeds."""
    rows = list(rows)
    caption = f"{caption}, {seed_count(each for _, found, _ in rows for each in found)}. {remark}"
    cells: list[tuple[str | Cell, ...]] = [(*words, *map(cell, found, published)) for words, found, published in rows]
    return Table(label=label, paper=paper, caption=caption, columns=columns, rows=tuple(cells))


def compare_methods(
    what: str,
    results: Sequence[RunResult],
    methods: Sequence[str],
    published: Mapping[str, object] | None,
    metric: Metric = retained,
) -> ComparisonLine:
    """A metric of several methods in one line; without published numbers the comparison is added here."""
    measured = joined([over_seeds(pick(results, method=method), metric) for method in methods])
    paper = ADDED_HERE if published is None else joined_numbers([published[method] for method in methods])
    return ComparisonLine(what, measured, paper)


def joined(found: Sequence[Estimate | None], *, sign: bool = False) -> str:
    """Estimates in one line, separated by slashes."""
    if all(each is None for each in found):
        return "not run"
    return " / ".join(shown(each, sign=sign) for each in found)


def joined_numbers(values: Sequence[object]) -> str:
    """Published numbers in one line, separated by slashes.

    >>> joined_numbers([5, 61.2])
    '5 / 61.20'
    """
    return " / ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values)


def joined_names(methods: Sequence[str]) -> str:
    """Method names in one line, separated by slashes."""
    return " / ".join(method_name(method) for method in methods)


def draw(make: Callable[[Collected], Picture], found: Collected, folder: Path) -> tuple[Picture, list[Path]]:
    """Draw one figure and write it as SVG and PNG; the same records give the same bytes."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):  # the ids in an SVG, and so its bytes, depend on the drawing alone
        drawn = make(found)
        return drawn, save(drawn.figure, folder / drawn.label.replace(":", "-"))
