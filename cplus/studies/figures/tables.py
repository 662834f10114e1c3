"""The paper's tables from records, each measured figure beside the published one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cplus.evaluation.statistics import Estimate, estimate
from cplus.experiment.record import RunResult
from cplus.studies import STUDIES, e05, e07, e08
from cplus.studies.collected import Collected
from cplus.studies.figures.drawing import counted, method_name
from cplus.studies.summaries import Figure, learned, over_seeds, pick, retained, shown


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A measured figure as it is read, and the paper's where it has one."""

    measured: str
    published: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table by its label in the paper; the first column names the row."""

    label: str
    paper: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]


def cell(found: Estimate | None, published: Any = None) -> Cell:
    """One figure with its standard error; the paper's may have one too.

    >>> cell(Estimate(83.26, 0.71, 5), (82.32, 0.64))
    Cell(measured='83.3 ± 0.7', published='82.32 ± 0.64')
    """
    if isinstance(published, tuple):
        return Cell(measured=shown(found), published=" ± ".join(f"{value:.2f}" for value in published))
    return Cell(measured=shown(found), published=None if published is None else f"{published:.2f}")


def numbers(study: str, place: int = 0) -> Mapping[str, Any]:
    """The paper's numbers that stand beside a study's declaration."""
    return STUDIES[study].published[place].numbers


def tab_cplus_ablation(found: Collected) -> Table:
    """Retention with each component left out.

    Paper: Table 1.
    """
    names = {
        "cplus-anchors": "Anchor gradient only",
        "cplus-probes": "Probe gradient only",
        "cplus-no-ema": "CPLUS without EMA",
        "cplus": "CPLUS",
        "cplus-norm-aligned": "CPLUS + norm alignment",
        "cplus-gradient": "mask on the gradient (added here)",
    }
    own = pick(found.studies["e04"].runs, num_anchors=found.scale.anchors, anchor_weight=0.5, beta=0.9, shots=2)
    own = pick(own, temperature=0.8)
    rows, drawn = [], []
    for method, name in names.items():
        kept, new = (over_seeds(pick(own, method=method), figure) for figure in (retained, learned))
        rows.append((name, cell(kept, numbers("e04").get(method)), cell(new)))
        drawn.append(kept)
    return Table(
        label="tab:cplus-ablation",
        paper="Table 1",
        caption=f"Component ablation at A = {found.scale.anchors}, {counted(drawn)}. Published: one seed.",
        columns=("Variant", "Retention (%)", "Acquisition (%)"),
        rows=tuple(rows),
    )


def tab_experiment_index(found: Collected) -> Table:
    """The experiments with their questions, where they stand, and the command of each.

    Paper: Table 2.
    """
    rows = tuple(
        (name, each.study.question, each.study.paper, found.command(name)) for name, each in found.studies.items()
    )
    return Table(
        label="tab:experiment-index",
        paper="Table 2",
        caption="Experiment index; e11 to e13 are added here.",
        columns=("ID", "Question", "Location", "Command"),
        rows=rows,
    )


def tab_ema_selection(found: Collected) -> Table:
    """Mean and tail reduction, with and without smoothing.

    Paper: Table 3.
    """
    own = pick(found.studies["e04"].runs, num_anchors=64, anchor_weight=0.5, beta=0.9)
    settings = {"cplus-no-ema": ("Mean", "None"), "cplus": ("Mean", "0.9"), "cplus-cvar": ("CVaR", "0.9")}
    rows, drawn = [], []
    for method, words in settings.items():
        kept, new = (over_seeds(pick(own, method=method), figure) for figure in (retained, learned))
        rows.append((*words, cell(kept, numbers("e04", 1)[method]), cell(new, 100.0)))
        drawn.append(kept)
    return Table(
        label="tab:ema-selection",
        paper="Table 3",
        caption=f"Reference reduction and mask smoothing at A = 64, {counted(drawn)}. Published: three runs.",
        columns=("Reduction", "EMA", "Retention (%)", "Acquisition (%)"),
        rows=tuple(rows),
    )


def tab_anchor_composition(found: Collected) -> Table:
    """Retention, Correction and accuracy on the anchors' task by how many anchors were answered rightly.

    Paper: Table 4.
    """
    own, anchors = found.studies["e07"], found.scale.anchors
    figures: tuple[Figure, ...] = (retained, e07.corrected, e07.overall)
    rows: list[tuple[str | Cell, ...]] = []
    drawn: list[Estimate | None] = []
    for wrong in dict.fromkeys(getattr(spec, "wrong_anchors", 0) for spec in own.specs):
        here = [over_seeds(pick(own.runs, wrong_anchors=wrong), figure) for figure in figures]
        published = numbers("e07").get(str(wrong), (None,) * 3) if anchors == 8 else (None,) * 3
        rows.append((str(anchors - wrong), str(wrong), *map(cell, here, published)))
        drawn += here
    new, kept = found.scale.crossed
    return Table(
        label="tab:anchor-composition",
        paper="Table 4",
        caption=f"Anchors of {kept} while {new} is learned, {counted(drawn)}. Published: CSQA and MedQA, one seed.",
        columns=("Base-correct", "Base-wrong", "Retention (%)", "Correction (%)", "Overall (%)"),
        rows=tuple(rows),
    )


def tab_fixed_aggressive_update(found: Collected) -> Table:
    """Acquisition, Retention and overall accuracy under one large learning rate.

    Paper: Table 5.
    """
    figures: tuple[Figure, ...] = (learned, retained, e08.overall)
    rows, drawn = _by_method(found.studies["e08"].runs, e08.METHODS, figures, numbers("e08"))
    lr, epochs = found.scale.stress
    return Table(
        label="tab:fixed-aggressive-update",
        paper="Table 5",
        caption=f"Learning rate {lr:g} for {epochs} epochs, {counted(drawn)}. Published: 1e-05 for 10 epochs, seed 0.",
        columns=("Method", "Acquisition (%)", "Retention (%)", "Overall accuracy (%)"),
        rows=rows,
    )


def _by_method(
    results: Sequence[RunResult], methods: Sequence[str], figures: Sequence[Figure], published: Mapping[str, Any]
) -> tuple[tuple[tuple[str | Cell, ...], ...], list[Estimate | None]]:
    """A row for each method with its figures, and all figures."""
    rows: list[tuple[str | Cell, ...]] = []
    drawn: list[Estimate | None] = []
    for method in methods:
        here = [over_seeds(pick(results, method=method), figure) for figure in figures]
        rows.append((method_name(method), *map(cell, here, published[method])))
        drawn += here
    return tuple(rows), drawn


def tab_matched_update_controls(found: Collected) -> Table:
    """CPLUS against updates of its size and masks of its density.

    Paper: Table 6.
    """
    own = [result for result in found.studies["e09"].runs if not result.spec.diagnose]
    names = {
        "norm-matched": ("Norm-matched SFT", "Applied update norm"),
        "shuffled": ("Randomized CPLUS mask", "Per-tensor mask coefficients"),
        "cplus": ("CPLUS", "Probe-informed coordinate placement"),
        "cpl": ("CPL", "none (App. E.7)"),
    }
    rows, drawn = [], []
    for method, words in names.items():
        kept, new = (over_seeds(pick(own, method=method), figure) for figure in (retained, learned))
        rows.append((*words, cell(kept, numbers("e09")[method]), cell(new, 100.0)))
        drawn.append(kept)
    return Table(
        label="tab:matched-update-controls",
        paper="Table 6",
        caption=f"Matched update controls at A = {found.scale.anchors}, {counted(drawn)}. Published: seed 0.",
        columns=("Method", "Matched property", "Retention (%)", "Acquisition (%)"),
        rows=tuple(rows),
    )


def tab_sequential_stage_summary(found: Collected) -> Table:
    """Average accuracy over the tasks met so far, after each stage.

    Paper: Table 7.
    """
    tasks = found.scale.tasks
    rows, drawn = _sequence_rows(found, [f"average after {task}" for task in tasks[1:]], 0)
    return Table(
        label="tab:sequential-stage-summary",
        paper="Table 7",
        caption=f"Average Task Accuracy (%), {counted(drawn)}. Published: after arc_c, mmlu, medqa, three seeds.",
        columns=("Method", *(f"After {task}" for task in tasks[1:])),
        rows=rows,
    )


def tab_sequential_final(found: Collected) -> Table:
    """Accuracy on every task after the last stage, and their average.

    Paper: Table 8.
    """
    tasks = found.scale.tasks
    rows, drawn = _sequence_rows(found, [f"{task} at the end" for task in tasks], 1)
    ends = {method: _average(found, method) for method in e05.METHODS}
    last = numbers("e05")
    whole = tuple(
        (*row, cell(ends[method], last[method][-1] if len(tasks) == 4 else None))
        for method, row in zip(e05.METHODS, rows, strict=True)
    )
    return Table(
        label="tab:sequential-final",
        paper="Table 8",
        caption=f"Accuracy (%) at the end, {counted(drawn)}. Published: csqa, arc_c, mmlu, medqa, three seeds.",
        columns=("Method", *tasks, "Average"),
        rows=whole,
    )


def _sequence_rows(
    found: Collected, figures: Sequence[str], place: int
) -> tuple[tuple[tuple[str | Cell, ...], ...], list[Estimate | None]]:
    """A row for each method; the paper's numbers only where the sequence has as many tasks as the paper's."""
    measured = {row.at["method"]: row.figures for row in found.studies["e05"].summary.rows}
    rows: list[tuple[str | Cell, ...]] = []
    drawn: list[Estimate | None] = []
    for method in e05.METHODS:
        here = [measured.get(method, {}).get(name) for name in figures]
        given = numbers("e05", place)[method] if len(found.scale.tasks) == 4 else (None,) * len(figures)
        rows.append((method_name(method), *map(cell, here, given)))
        drawn += here
    return tuple(rows), drawn


def _average(found: Collected, method: str) -> Estimate | None:
    own = [result for result in found.studies["e05"].sequences if result.spec.method == method]
    return estimate([e05.average(result, len(result.spec.tasks)) for result in own]) if own else None
