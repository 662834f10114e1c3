"""The frontier on a chat model: past against new loss while it learns; not in the paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cplus.experiment.record import RunResult
from cplus.studies.chat import KEPT, LEVEL, OURS, WORDS, curve, setting
from cplus.studies.collected import Collected
from cplus.studies.figures.drawing import Picture, colour_and_marker, mark_not_run, method_name, panels
from cplus.studies.figures.tables import ADDED_HERE, ComparisonLine, Table, cell
from cplus.studies.summaries import shown

LINES = {"anchors": "-", "general": "--", "both": ":"}
TITLES = {"style": "past: answers of any kind", "format": "past: answers in JSON"}


def fig_chat(found: Collected) -> Picture:
    """Every run of the scale's own rate as a line from the base model to where it stopped learning."""
    own = [run for run in found.studies["chat"].runs if run.spec.lr == found.scale.base.lr]
    figure, axes = panels(len(TITLES), width=8.4, height=3.6)
    for axis, (name, title) in zip(axes, TITLES.items(), strict=True):
        _draw(axis, [run for run in own if setting(run.spec) == name])
        axis.set(title=title, xlabel="loss of the new answers (nats a token): learned to the right")
    axes[0].set_ylabel("rise of the past answers' loss")
    seeds = len({run.spec.seed for run in own})
    caption = (
        f"A chat model learns terse answers; n = {seeds} seeds. Methods are compared where the new loss is {LEVEL}."
    )
    return Picture(label="fig:chat", paper="Added here", caption=caption, figure=figure)


def _draw(axis: Any, runs: Sequence[RunResult]) -> None:
    if not runs:
        mark_not_run(axis)
        return
    named: set[str] = set()
    for run in runs:
        colour, marker = colour_and_marker(run.spec.method)
        points, label = curve(run), _name(run)
        axis.plot(
            [new for new, _ in points],
            [past - points[0][1] for _, past in points],
            color=colour,
            marker=marker,
            markersize=3,
            linewidth=1.2,
            linestyle=LINES[run.spec.keep],
            label="_" if label in named else label,
        )
        named.add(label)
    axis.axvline(LEVEL, color="#999999", linewidth=0.8, linestyle="--")
    axis.invert_xaxis()
    axis.legend(frameon=False, fontsize=7)


def _name(run: RunResult) -> str:
    name = method_name(run.spec.method)
    return f"{name}, {WORDS[run.spec.keep]}" if run.spec.method == OURS else name


def tab_chat(found: Collected) -> Table:
    """Every method and rate, the smallest rise of each setting first."""
    rows = found.studies["chat"].summary.rows
    rise = "rise of past loss"
    order = {name: number for number, name in enumerate(TITLES)}
    ordered = sorted(
        rows,
        key=lambda row: (order[row.at["past"]], row.figures[rise].mean if rise in row.figures else float("inf")),
    )
    return Table(
        label="tab:chat",
        paper="Added here",
        caption=f"The rise of the past answers' loss where the loss of the new answers is {LEVEL}, and what it took.",
        columns=("past", "method", "rows to keep", "rate", "rise (nats a token)", "updates", "seconds"),
        rows=tuple(
            (
                row.at["past"],
                method_name(row.at["method"]),
                WORDS.get(row.at["keep"], "-"),
                f"{row.at['lr']:.2g}",
                shown(row.figures.get(rise), digits=3),
                cell(row.figures.get("updates")),
                cell(row.figures.get("seconds")),
            )
            for row in ordered
        ),
    )


def comparison(found: Collected) -> list[ComparisonLine]:
    """CPLUS with each kind of rows to keep against plain fine-tuning at the same rate."""
    lr = found.scale.base.lr
    rows = {
        (row.at["past"], row.at["method"], row.at["keep"]): row.figures.get("rise of past loss")
        for row in found.studies["chat"].summary.rows
        if row.at["lr"] == lr
    }
    return [
        ComparisonLine(
            what=f"rise of the past loss at matched learning ({name}), {words}",
            measured=" / ".join(shown(rows.get((name, *own)), digits=3) for own in wanted),
            published=ADDED_HERE,
        )
        for name, words, wanted in (
            ("style", "SFT / CPLUS with anchors / with none given / with both", _COMPARED),
            ("format", "SFT / CPLUS with anchors", _COMPARED[:2]),
        )
    ]


_COMPARED = (("sft", ""), *((OURS, keep) for keep in KEPT))
FIGURES = (fig_chat,)
TABLES = (tab_chat,)
