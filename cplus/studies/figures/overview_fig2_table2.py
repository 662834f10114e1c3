"""The overview of the method (Fig. 2) and the index of the experiments (Table 2), which belong to no one study."""

from __future__ import annotations

from typing import Any

from cplus.studies.collected import Collected
from cplus.studies.figures.drawing import CARD, INK, SOFT, Picture, panels
from cplus.studies.figures.tables import Table

# Centre, width and text of each box; then the arrows between boxes.
_BOXES = {
    "new": (1.6, 3.3, 2.6, "new data"),
    "propose": (1.6, 2.0, 2.6, "optimizer proposes\n$\\delta$"),
    "past": (5.4, 3.3, 3.6, "anchors + self-probes\nof the frozen model"),
    "gradient": (5.4, 2.0, 3.6, "gradient $\\hat g$ of past behaviour,\nonce an epoch"),
    "gate": (
        3.5,
        0.75,
        6.4,
        "gate: $m_i = [\\,\\hat g_i\\,\\delta_i \\leq 0\\,]$, smoothed over steps to $\\alpha_i \\in [0, 1]$",
    ),
    "apply": (9.3, 0.75, 2.8, "apply\n$\\theta_i \\leftarrow \\theta_i + \\alpha_i\\,\\delta_i$"),
}
_ARROWS = (("new", "propose"), ("past", "gradient"), ("propose", "gate"), ("gradient", "gate"), ("gate", "apply"))
_HALF = 0.36


def fig_method_overview(found: Collected) -> Picture:
    """The method as a drawing; it has no data.

    Paper: Fig. 2.
    """
    figure, (axis,) = panels(1, width=8.2, height=3.0)
    axis.set_axis_off()
    axis.set(xlim=(0, 11), ylim=(0.1, 3.9))
    for x, y, width, words in _BOXES.values():
        _box(axis, x, y, width, words)
    for start, end in _ARROWS:
        _arrow(axis, start, end)
    caption = (
        "CPLUS. The optimizer proposes an update from new data alone; gradients of anchors and self-probes decide, "
        "coordinate by coordinate, how much of it is applied. Nothing is replayed, nothing added or reversed."
    )
    return Picture(label="fig:method-overview", paper="Fig. 2", caption=caption, figure=figure)


def _box(axis: Any, x: float, y: float, width: float, words: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = (x - width / 2, y - _HALF)
    axis.add_patch(
        FancyBboxPatch(corner, width, 2 * _HALF, boxstyle="round,pad=0.02,rounding_size=0.12", ec="#0072B2", fc=CARD)
    )
    axis.text(x, y, words, ha="center", va="center", color=INK)


def _arrow(axis: Any, start: str, end: str) -> None:
    (x, y, width, _), (to_x, to_y, to_width, _) = _BOXES[start], _BOXES[end]
    if y == to_y:
        tail, tip = (x + width / 2, y), (to_x - to_width / 2, to_y)
    else:
        tail, tip = (x, y - _HALF), (x, to_y + _HALF)
    axis.annotate("", tip, tail, arrowprops={"arrowstyle": "-|>", "color": SOFT, "shrinkA": 3, "shrinkB": 3})


def tab_experiment_index(found: Collected) -> Table:
    """The experiments with their questions, their places in the paper and their commands.

    Paper: Table 2.
    """
    return Table(
        label="tab:experiment-index",
        paper="Table 2",
        caption="Experiment index; e11 to e13 are added here.",
        columns=("ID", "Question", "Location", "Command"),
        rows=tuple(
            (name, each.study.question, each.study.paper, found.command(name)) for name, each in found.studies.items()
        ),
    )
