"""E7: how does the composition of the anchors affect preservation?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.lab.drawing import Row, joined, joined_numbers, measured_table
from cplus.lab.records import RunResult
from cplus.lab.scales import Scale
from cplus.lab.study import Collected, ComparisonLine, Published, Summary, Table
from cplus.lab.summaries import Metric, above, learned, margin, over_seeds, pick, retained, shown, table
from cplus.training.settings import RunSpec

TITLE = "Anchor composition"
QUESTION = "How does anchor composition affect preservation?"
PAPER = "Table 4; App. E.4"
TABLE_4 = Published(
    "Table 4, wrong anchors of 8: Retention, Correction, overall on CSQA after MedQA, accuracy on supplied anchors",
    {
        "0": (83.49, 13.42, 40.15, 100.0),
        "2": (81.34, 21.24, 44.16, 100.0),
        "4": (80.62, 23.16, 45.07, 100.0),
        "6": (80.38, 20.80, 43.52, 100.0),
        "8": (80.86, 23.45, 45.35, 100.0),
    },
)

WHERE = "App. E.4; Table 4"


def runs(scale: Scale) -> list[RunSpec]:
    """CPLUS learns a new task with anchors of another one, of which 0, 25, ... 100 % were answered incorrectly."""
    new, kept = scale.new_and_anchor_task
    wrong = [round(share * scale.anchors) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return scale.each({"wrong_anchors": wrong, "seed": range(scale.seeds_where_one)}, task=new, anchor_task=kept)


def overall(result: RunResult) -> float | None:
    """Accuracy over all evaluated rows of the anchors' task."""
    if result.correction is None:
        return None
    counts = result.counts
    right = result.retention * counts["asked"] + result.correction * counts["wrong"]
    return right / (counts["asked"] + counts["wrong"])


METRICS: dict[str, Metric] = {
    # correction: the initially wrong rows of the anchors' task, never trained on, that are right at the end
    "retention": retained,
    "correction": lambda result: result.correction,
    "overall": overall,
    "acquisition": learned,
    "supplied anchors": lambda result: result.anchors_right,  # None in records from before it was measured
}


def summary(mine: Sequence[RunResult]) -> Summary:
    """Retention, Correction and overall accuracy on the anchors' task by composition."""
    most = max((result.spec.wrong_anchors for result in mine), default=0)
    right, wrong = pick(mine, wrong_anchors=0), pick(mine, wrong_anchors=most)
    claims = (
        above("right anchors keep more than wrong ones", right, wrong, paper=WHERE),
        above("wrong anchors correct more than right ones", wrong, right, METRICS["correction"], paper=WHERE),
        above("wrong anchors leave a higher overall accuracy than right ones", wrong, right, overall, paper=WHERE),
    )
    more, fixed = shown(margin(right, wrong), sign=True), shown(margin(wrong, right, METRICS["correction"]), sign=True)
    ahead = shown(margin(wrong, right, overall), sign=True)
    answer = (
        f"Anchors that the model answered correctly, instead of incorrectly, change Retention by {more} points; "
        f"incorrect ones, instead of correct ones, change Correction by {fixed} and the overall accuracy on the "
        f"anchors' task by {ahead}."
    )
    return Summary(rows=table(mine, ("num_anchors", "wrong_anchors"), METRICS), answer=answer, claims=claims)


# E7, anchor composition: Retention, Correction and accuracy by the number of wrong anchors (Table 4).


def tab_anchor_composition(found: Collected) -> Table:
    """Retention, Correction and accuracy on the anchors' task by the number of anchors answered correctly.

    Paper: Table 4.
    """
    own, anchors = found.studies["e07"], found.scale.anchors
    metrics = [METRICS[name] for name in ("retention", "correction", "overall", "supplied anchors")]
    published = TABLE_4.numbers if anchors == 8 else {}
    rows: list[Row] = []
    for wrong in dict.fromkeys(spec.wrong_anchors for spec in own.specs):
        measured = [over_seeds(pick(own.results, wrong_anchors=wrong), metric) for metric in metrics]
        rows.append(((str(anchors - wrong), str(wrong)), measured, published.get(str(wrong), (None,) * len(metrics))))
    new, kept = found.scale.new_and_anchor_task
    columns = ("Base-correct", "Base-wrong", "Retention (%)", "Correction (%)", "Overall (%)", "Anchors (%)")
    words = f"Anchors of {kept} while {new} is learned", "Published: CSQA and MedQA, one seed."
    return measured_table("tab:anchor-composition", "Table 4", columns, rows, *words)


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention with only correct and with only wrong anchors, with the paper's."""
    own = found.studies["e07"]
    most = max((spec.wrong_anchors for spec in own.specs), default=0)
    kept = [over_seeds(pick(own.results, wrong_anchors=wrong), retained) for wrong in (0, most)]
    paper = [TABLE_4.numbers[wrong][0] for wrong in ("0", "8")]
    what = "Retention, all anchors right / all wrong (%)"
    return [ComparisonLine(what, joined(kept), joined_numbers(paper))]
