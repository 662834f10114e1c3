"""E13, a gentle start: Acquisition and Retention at a constant rate and with a warm-up; not in the paper."""

from __future__ import annotations

from cplus.evaluation.statistics import Estimate
from cplus.studies.collected import Collected
from cplus.studies.e13 import METHODS, SHARE, kept_at, level, with_warmup
from cplus.studies.figures.drawing import Picture, colour_and_marker, legend, method_name, panels, seed_count
from cplus.studies.figures.e06_fig7_fig8_fig12 import draw_path
from cplus.studies.figures.tables import ADDED_HERE, ComparisonLine, joined, joined_names
from cplus.studies.summaries import over_seeds, pick

SCHEDULES = {"constant rate": False, "gentle start": True}


def fig_gentle_start(found: Collected) -> Picture:
    """The path of Acquisition and Retention at a constant rate and with a warm-up."""
    own = found.studies["e13"]
    figure, axes = panels(2, width=4.0, height=2.9, share=True)
    for axis, (title, warm) in zip(axes, SCHEDULES.items(), strict=True):
        draw_path(axis, with_warmup(own.runs, warm))
        axis.set(title=title)
    axes[1].set_ylabel("")
    for method in METHODS:
        colour, marker = colour_and_marker(method)
        axes[0].plot([], [], color=colour, marker=marker, label=method_name(method))
    legend(figure)
    drawn = [row.figures["final retention"] for row in own.summary.rows]
    caption = (
        f"The path of Acquisition and Retention, epoch by epoch, at a constant learning rate and at one that rises "
        f"over {SHARE:.0%} of the updates. Large markers are the first epoch with full Acquisition. Means, "
        f"{seed_count(drawn)}."
    )
    return Picture(label="fig:gentle-start", paper="Added here", caption=caption, figure=figure)


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention at equal Acquisition by schedule: SFT and CPLUS, then every method."""
    runs = found.studies["e13"].runs
    common = level([result for result in runs if result.curve])

    def kept(method: str, warm: bool) -> Estimate | None:
        return over_seeds(with_warmup(pick(runs, method=method), warm), kept_at(common))

    return [
        ComparisonLine(
            what=f"Retention where {common:.0f} % are learned, constant rate / gentle start, SFT and CPLUS (%)",
            measured=" and ".join(joined([kept(m, warm) for warm in (False, True)]) for m in ("sft", "cplus")),
            published=ADDED_HERE,
        ),
        *(
            ComparisonLine(
                what=f"the same, {title}, {joined_names(METHODS)} (%)",
                measured=joined([kept(method, warm) for method in METHODS]),
                published=ADDED_HERE,
            )
            for title, warm in SCHEDULES.items()
        ),
    ]


FIGURES = (fig_gentle_start,)
TABLES = ()
