"""Figures from records; the palette is the paper's and is safe for colour-blind readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cplus.files import replacing

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


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """A figure and its axes without global state; drawing needs no display."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "cplus"  # element ids, and so the bytes, depend on the drawing alone
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns)
    for axis in [axes] if columns == 1 else axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def retention_bars(summary: Mapping[str, Mapping[str, Mapping[str, float]]], stem: Path) -> list[Path]:
    """Retention, Acquisition and other domains by method: means with standard errors."""
    many = len(summary) > 6
    figure, axes = new_figure(max(9.0, 1.1 * len(summary)), 4.2 if many else 3.0, columns=3)
    titles = {"retention": "Retention (%)", "acquisition": "Acquisition (%)", "external": "Other domains kept (%)"}
    methods: Sequence[str] = list(summary)
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        means = [summary[m][metric]["mean"] for m in methods]
        errors = [summary[m][metric]["se"] for m in methods if "se" in summary[m][metric]] or None  # none for one seed
        colours = [COLOURS.get(m, OTHER) for m in methods]
        bars = axis.bar([label(m) for m in methods], means, yerr=errors, color=colours, capsize=3, width=0.65)
        axis.bar_label(bars, fmt="%.0f" if many else "%.1f", padding=3, fontsize=6 if many else 8)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_ylim(0, 110)
        axis.set_yticks(range(0, 101, 20))
        axis.tick_params(axis="x", labelsize=8, rotation=90 if many else 0)
    return save(figure, stem)
