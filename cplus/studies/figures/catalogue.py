"""Which figures and tables belong to which study, and how a figure is put on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from cplus.plotting import save
from cplus.studies.collected import Collected
from cplus.studies.figures import course, grid, masks, outside, overview, probes, tables
from cplus.studies.figures.drawing import Picture, style
from cplus.studies.figures.tables import Table

Draw: TypeAlias = Callable[[Collected], Picture]
Tabulate: TypeAlias = Callable[[Collected], Table]

# The overview and the index belong to no study: they open the report.
OVERVIEW: Draw = overview.fig_method_overview
INDEX: Tabulate = tables.tab_experiment_index
FIGURES: Mapping[str, tuple[Draw, ...]] = {
    "e01": (
        grid.fig_main_results,
        grid.fig_problem_motivation,
        grid.fig_model_scale_headline,
        grid.fig_model_scale,
    ),
    "e02": (outside.fig_medqa_broader_capability, outside.fig_broader_capability_appendix),
    "e03": (probes.fig_self_probe_role_anchor_scale,),
    "e04": (probes.fig_hyperparameters,),
    "e05": (course.fig_sequential_multitask,),
    "e06": (course.fig_learning_dynamics, course.fig_retention_compute, course.fig_epoch_level_dynamics),
    "e09": (masks.fig_gradient_source_dynamics,),
    "e10": (
        masks.fig_mask_analysis,
        masks.fig_mask_analysis_coordinates,
        masks.fig_mask_agreement_all_layers,
        masks.fig_mask_cross_reference,
    ),
    "e11": (probes.fig_answer_prior,),
    "e12": (probes.fig_rotating_evidence,),
    "e13": (course.fig_gentle_start,),
}
TABLES: Mapping[str, tuple[Tabulate, ...]] = {
    "e04": (tables.tab_cplus_ablation, tables.tab_ema_selection),
    "e05": (tables.tab_sequential_stage_summary, tables.tab_sequential_final),
    "e07": (tables.tab_anchor_composition,),
    "e08": (tables.tab_fixed_aggressive_update,),
    "e09": (tables.tab_matched_update_controls,),
}


def draw(make: Draw, found: Collected, folder: Path) -> tuple[Picture, list[Path]]:
    """Draw one figure and write it as SVG and PNG; the same records give the same bytes."""
    with style():
        picture = make(found)
        return picture, save(picture.figure, folder / picture.label.replace(":", "-"))
