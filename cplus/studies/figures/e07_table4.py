"""E7, anchor composition: Retention, Correction and accuracy by the number of wrong anchors (Table 4)."""

from __future__ import annotations

from cplus.evaluation.statistics import Estimate
from cplus.studies.collected import Collected, CollectedStudy
from cplus.studies.e07 import corrected, overall, supplied
from cplus.studies.figures.drawing import seed_count
from cplus.studies.figures.tables import Cell, ComparisonLine, Table, cell, joined, joined_numbers, published_numbers
from cplus.studies.summaries import Metric, over_seeds, pick, retained

METRICS: dict[str, Metric] = {"Retention": retained, "Correction": corrected, "overall accuracy": overall}


def tab_anchor_composition(found: Collected) -> Table:
    """Retention, Correction and accuracy on the anchors' task by the number of anchors answered correctly.

    Paper: Table 4.
    """
    own, anchors = found.studies["e07"], found.scale.anchors
    rows: list[tuple[str | Cell, ...]] = []
    drawn: list[Estimate | None] = []
    for wrong in _wrong_counts(own):
        measured = [over_seeds(pick(own.runs, wrong_anchors=wrong), metric) for metric in METRICS.values()]
        paper = published_numbers("e07").get(str(wrong), (None,) * 3) if anchors == 8 else (None,) * 3
        own_rows = over_seeds(pick(own.runs, wrong_anchors=wrong), supplied)
        last = cell(own_rows, published_numbers("e07", 1)["supplied anchors"] if anchors == 8 else None)
        rows.append((str(anchors - wrong), str(wrong), *map(cell, measured, paper), last))
        drawn += measured
    new, kept = found.scale.new_and_anchor_task
    return Table(
        label="tab:anchor-composition",
        paper="Table 4",
        caption=f"Anchors of {kept} while {new} is learned, {seed_count(drawn)}. Published: CSQA and MedQA, one seed.",
        columns=(
            "Base-correct",
            "Base-wrong",
            "Retention (%)",
            "Correction (%)",
            "Overall (%)",
            "Anchors (%)",
        ),
        rows=tuple(rows),
    )


def _wrong_counts(own: CollectedStudy) -> list[int]:
    return list(dict.fromkeys(getattr(spec, "wrong_anchors", 0) for spec in own.specs))


def comparison(found: Collected) -> list[ComparisonLine]:
    """Each metric with only correct and with only wrong anchors, with the paper's."""
    own = found.studies["e07"]
    ends = [pick(own.runs, wrong_anchors=wrong) for wrong in (0, max(_wrong_counts(own), default=0))]
    paper = [published_numbers("e07")[wrong] for wrong in ("0", "8")]
    return [
        ComparisonLine(
            what=f"{name}, all anchors right / all wrong (%)",
            measured=joined([over_seeds(end, metric) for end in ends]),
            published=joined_numbers([values[column] for values in paper]),
        )
        for column, (name, metric) in enumerate(METRICS.items())
    ]


FIGURES = ()
TABLES = (tab_anchor_composition,)
