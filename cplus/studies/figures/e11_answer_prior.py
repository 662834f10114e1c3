"""E11, answer prior: how much of forgetting is a moved prior over answers; not in the paper."""

from __future__ import annotations

from cplus.evaluation.statistics import Estimate
from cplus.studies.collected import Collected
from cplus.studies.e11 import METHODS, METRICS, explained
from cplus.studies.figures.drawing import PALETTE, Picture, legend, line, mark_not_run, method_name, panels, seed_count
from cplus.studies.figures.tables import ADDED_HERE, ComparisonLine, joined
from cplus.studies.summaries import over_seeds, pick, retained


def fig_answer_prior(found: Collected) -> Picture:
    """Retention, its mean over answers, and Retention with each answer's mean change of score removed."""
    own = found.studies["e11"].runs
    figure, (axis,) = panels(1, width=6.4, height=3.0)
    kinds = {"retention": "as asked", "macro": "averaged over answers", "corrected": "prior taken off"}
    drawn: list[Estimate] = []
    for number, (kind, name) in enumerate(kinds.items()):
        each = ((x, over_seeds(pick(own, method=m), METRICS[kind])) for x, m in enumerate(METHODS))
        points = [(x + 0.18 * (number - 1), estimate) for x, estimate in each if estimate is not None]
        line(axis, points, name, PALETTE[number], "os^"[number], linestyle="none")
        drawn += [estimate for _, estimate in points]
    axis.set_xticks(range(len(METHODS)), [method_name(method) for method in METHODS])
    axis.set_ylabel("Retention (%)")
    if not drawn:
        mark_not_run(axis)
    legend(figure)
    caption = (
        "How much of forgetting is a moved prior over answers: Retention, the mean over answers of their Retention, "
        f"and Retention after each answer's mean change of score is taken off. Means and standard errors, "
        f"{seed_count(drawn)}."
    )
    return Picture(label="fig:answer-prior", paper="Added here", caption=caption, figure=figure)


def comparison(found: Collected) -> list[ComparisonLine]:
    """The share of forgetting that is a moved prior, and Retention by the labels of the bank."""
    own, banks = found.studies["e11"].runs, ("constant-label", "cplus", "balanced-label")
    return [
        ComparisonLine(
            what="forgetting that is a moved prior, SFT / CPLUS (%)",
            measured=joined([over_seeds(pick(own, method=method), explained) for method in ("sft", "cplus")]),
            published=ADDED_HERE,
        ),
        ComparisonLine(
            what="Retention, one constant label / as it came / balanced (%)",
            measured=joined([over_seeds(pick(own, method=method), retained) for method in banks]),
            published=ADDED_HERE,
        ),
    ]


FIGURES = (fig_answer_prior,)
TABLES = ()
