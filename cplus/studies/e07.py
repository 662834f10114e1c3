"""E7: how does the composition of the anchors affect preservation?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.experiment.record import RunResult
from cplus.experiment.settings import RunSpec
from cplus.studies.scales import Scale
from cplus.studies.study import Published, Result, Study, Summary
from cplus.studies.summaries import above, learned, margin, pick, retained, run_results, shown, table

WHERE = "App. E.4; Table 4"


def runs(scale: Scale) -> list[RunSpec]:
    """CPLUS learns a new task with anchors of another one, of which 0, 25, ... 100 % were answered incorrectly."""
    new, kept = scale.new_and_anchor_task
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    return [
        scale.at(task=new, anchor_task=kept, wrong_anchors=round(share * scale.anchors), seed=seed)
        for share in shares
        for seed in range(scale.seeds_where_one)
    ]


def corrected(result: RunResult) -> float | None:
    """Correction: the share of initially wrong rows of the anchors' task, not trained on, that are right at the end."""
    return result.correction


def overall(result: RunResult) -> float | None:
    """Accuracy over all evaluated rows of the anchors' task."""
    if result.correction is None:
        return None
    counts = result.counts
    right = result.retention * counts["asked"] + result.correction * counts["wrong"]
    return right / (counts["asked"] + counts["wrong"])


def supplied(result: RunResult) -> float | None:
    """Accuracy on the supplied anchors themselves; None in records from before it was measured."""
    return result.anchors_right


METRICS = {
    "retention": retained,
    "correction": corrected,
    "overall": overall,
    "acquisition": learned,
    "supplied anchors": supplied,
}


def summary(results: Sequence[Result]) -> Summary:
    """Retention, Correction and overall accuracy on the anchors' task by composition."""
    mine = run_results(results)
    most = max((result.spec.wrong_anchors for result in mine), default=0)
    right, wrong = pick(mine, wrong_anchors=0), pick(mine, wrong_anchors=most)
    claims = (
        above("right anchors keep more than wrong ones", right, wrong, paper=WHERE),
        above("wrong anchors correct more than right ones", wrong, right, corrected, paper=WHERE),
        above("wrong anchors leave a higher overall accuracy than right ones", wrong, right, overall, paper=WHERE),
    )
    more, fixed = shown(margin(right, wrong), sign=True), shown(margin(wrong, right, corrected), sign=True)
    ahead = shown(margin(wrong, right, overall), sign=True)
    answer = (
        f"Anchors that the model answered correctly, instead of incorrectly, change Retention by {more} points; "
        f"incorrect ones, instead of correct ones, change Correction by {fixed} and the overall accuracy on the "
        f"anchors' task by {ahead}."
    )
    return Summary(rows=table(mine, ("num_anchors", "wrong_anchors"), METRICS), answer=answer, claims=claims)


STUDY = Study(
    name="e07",
    title="Anchor composition",
    question="How does anchor composition affect preservation?",
    paper="Table 4; App. E.4",
    runs=runs,
    summary=summary,
    published=(
        Published(
            where="Table 4, wrong anchors of 8: Retention, Correction, overall on CSQA after MedQA",
            numbers={
                "0": (83.49, 13.42, 40.15),
                "2": (81.34, 21.24, 44.16),
                "4": (80.62, 23.16, 45.07),
                "6": (80.38, 20.80, 43.52),
                "8": (80.86, 23.45, 45.35),
            },
        ),
        Published(
            where="Table 4, accuracy on the eight supplied anchors, every row", numbers={"supplied anchors": 100.0}
        ),
    ),
)
