"""E13: how much forgetting does a gentle start avoid, and what does CPLUS add to it?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.evaluation.statistics import LossPoint, common_level, crossing
from cplus.lab.drawing import joined, panels, picture
from cplus.lab.e06 import draw_curves
from cplus.lab.records import RunResult
from cplus.lab.scales import METHODS, Scale
from cplus.lab.study import ADDED_HERE, Collected, ComparisonLine, Picture, Summary
from cplus.lab.summaries import Metric, above, leads, margin, over_seeds, pick, retained, shown, table
from cplus.training.settings import RunSpec

TITLE = "A gentle start"
QUESTION = "How much forgetting does a warm-up avoid, and what does CPLUS add to it?"

SHARE = 0.5
SCHEDULES = {"constant rate": 0.0, "gentle start": SHARE}
LEARNED = 99.0


def runs(scale: Scale) -> list[RunSpec]:
    """Four methods, evaluated after every epoch, at a constant rate and at one that rises over half of the updates."""
    axes = {"warmup": SCHEDULES.values(), "method": METHODS, "seed": range(scale.seeds_where_three)}
    return scale.each(axes, evaluate_every=1, external=())


def path(result: RunResult) -> list[LossPoint]:
    """The percentages not yet learned and lost after each epoch, starting with the base model."""
    after = [(100.0 - point["acquisition"], 100.0 - point["retention"]) for point in result.curve]
    return [(100.0, 0.0), *after]


def level(results: Sequence[RunResult]) -> float:
    """The Acquisition at which runs are compared: 99 %, or the highest that every run reaches if that is lower."""
    return min(LEARNED, 100.0 - common_level(map(path, results))) if results else LEARNED


def kept_at(acquisition: float) -> Metric:
    """Retention where a run first reaches this Acquisition, interpolated linearly between epochs."""
    return lambda result: 100.0 - crossing(path(result), 100.0 - acquisition) if result.curve else None


def epochs_to_learn(result: RunResult) -> float | None:
    """The first epoch with 99 % Acquisition; None if there is none."""
    return next((point["epoch"] for point in result.curve if point["acquisition"] >= LEARNED), None)


def summary(results: Sequence[RunResult]) -> Summary:
    """Retention when the new rows are first learned, and at the end, by schedule and method."""
    mine = [result for result in results if result.curve]
    gentle, constant = pick(mine, warmup=SHARE), pick(mine, warmup=0.0)
    common = level(mine)
    kept, ours = kept_at(common), pick(gentle, method="cplus")
    columns = {"retention when learned": kept, "epochs to learn": epochs_to_learn, "final retention": retained}
    pairs = {method: (pick(gentle, method=method), pick(constant, method=method)) for method in METHODS}
    claims = (
        *(above(f"{method}: a gentle start keeps more", *own, kept) for method, own in pairs.items()),
        *leads("with a gentle start CPLUS keeps more than {}", gentle, METHODS[:-1], kept),
    )
    (sft, sft_constant), (cplus, cplus_constant) = (
        [shown(over_seeds(own, kept)) for own in pairs[method]] for method in ("sft", "cplus")
    )
    lead = shown(margin(ours, pick(gentle, method="sft"), kept), sign=True)
    answer = (
        f"Where {common:.0f} % of the new rows are first known, SFT has kept {sft_constant} % at a constant rate and "
        f"{sft} % with a gentle start, CPLUS {cplus_constant} % and {cplus} %: with a gentle start CPLUS still keeps "
        f"{lead} points more than SFT."
    )
    return Summary(rows=table(mine, ("warmup", "method"), columns), answer=answer, claims=claims)


# E13, a gentle start: Acquisition and Retention at a constant rate and with a warm-up; not in the paper.


def fig_gentle_start(found: Collected) -> Picture:
    """The path of Acquisition and Retention at a constant rate and with a warm-up."""
    own = found.studies["e13"]
    figure, axes = panels(2, width=4.0, height=2.9, share=True)
    for axis, (title, warmup) in zip(axes, SCHEDULES.items(), strict=True):
        draw_curves(axis, pick(own.results, warmup=warmup), "acquisition", "retention")
        axis.set(title=title)
    axes[1].set_ylabel("")
    caption = (
        f"The path of Acquisition and Retention, epoch by epoch, at a constant learning rate and at one that rises "
        f"over {SHARE:.0%} of the updates. Large markers are the first epoch with full Acquisition."
    )
    return picture(figure, "fig:gentle-start", "Added here", caption, "Means")


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention of SFT and CPLUS at equal Acquisition, by schedule."""
    runs = found.studies["e13"].results
    common = level([result for result in runs if result.curve])
    kept = [
        joined([over_seeds(pick(runs, method=method, warmup=warmup), kept_at(common)) for warmup in SCHEDULES.values()])
        for method in ("sft", "cplus")
    ]
    what = f"Retention where {common:.0f} % are learned, constant rate / gentle start, SFT and CPLUS (%)"
    return [ComparisonLine(what, " and ".join(kept), ADDED_HERE)]
