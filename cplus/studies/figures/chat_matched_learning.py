"""The frontier on a chat model: past against new loss while it learns; not in the paper."""

from __future__ import annotations

from cplus.experiment.record import RunResult
from cplus.studies.chat import KEPT, LEVEL, OURS, curve
from cplus.studies.collected import Collected
from cplus.studies.figures.drawing import Picture, colour_and_marker, mark_not_run, method_name, panels
from cplus.studies.figures.tables import ADDED_HERE, ComparisonLine, Table, cell
from cplus.studies.summaries import shown

LINES = {"anchors": "-", "general": "--", "both": ":"}
WORDS = {"anchors": "anchors given", "general": "none given", "both": "both"}


def fig_chat(found: Collected) -> Picture:
    """Every run of the scale's own rate as a line from the base model to where it stopped learning."""
    own = [run for run in found.studies["chat"].runs if run.spec.lr == found.scale.base.lr]
    figure, [axis] = panels(1, width=6.4, height=3.6)
    if not own:
        mark_not_run(axis)
    named: set[str] = set()
    for run in own:
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
    if own:
        axis.axvline(LEVEL, color="#999999", linewidth=0.8, linestyle="--")
        axis.invert_xaxis()
        axis.legend(frameon=False, fontsize=7)
    axis.set(
        xlabel="loss of the new answers (nats a token): learned to the right", ylabel="rise of the past answers' loss"
    )
    seeds = len({run.spec.seed for run in own})
    caption = (
        f"A chat model learns terse answers; n = {seeds} seeds. Methods are compared where the new loss is {LEVEL}."
    )
    return Picture(label="fig:chat", paper="Added here", caption=caption, figure=figure)


def _name(run: RunResult) -> str:
    name = method_name(run.spec.method)
    return f"{name}, {WORDS[run.spec.keep]}" if run.spec.method == OURS else name


def tab_chat(found: Collected) -> Table:
    """Every method and rate, the smallest rise first."""
    rows = found.studies["chat"].summary.rows
    rise = "rise of past loss"
    ordered = sorted(rows, key=lambda row: row.figures[rise].mean if rise in row.figures else float("inf"))
    return Table(
        label="tab:chat",
        paper="Added here",
        caption=f"The rise of the past answers' loss where the loss of the new answers is {LEVEL}, and what it took.",
        columns=("method", "rows to keep", "rate", "rise (nats a token)", "updates", "seconds"),
        rows=tuple(
            (
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
        (row.at["method"], row.at["keep"]): row.figures
        for row in found.studies["chat"].summary.rows
        if row.at["lr"] == lr
    }
    measured = [rows.get(("sft", ""), {}), *(rows.get((OURS, keep), {}) for keep in KEPT)]
    return [
        ComparisonLine(
            what="rise of the past loss at matched learning, SFT / CPLUS with anchors / with none given / with both",
            measured=" / ".join(shown(own.get("rise of past loss"), digits=3) for own in measured),
            published=ADDED_HERE,
        )
    ]


FIGURES = (fig_chat,)
TABLES = (tab_chat,)
