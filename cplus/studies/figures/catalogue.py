"""The figures, tables and comparison with the paper of each study, and how a figure is written to disk."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from cplus.plotting import save
from cplus.studies import STUDIES, figures
from cplus.studies.collected import Collected
from cplus.studies.figures import overview_fig2_table2
from cplus.studies.figures.drawing import Picture, style
from cplus.studies.figures.tables import ComparisonLine, Table

Draw: TypeAlias = Callable[[Collected], Picture]
Tabulate: TypeAlias = Callable[[Collected], Table]
Compare: TypeAlias = Callable[[Collected], list[ComparisonLine]]


def study_modules() -> dict[str, ModuleType]:
    """The module of each study's figures and tables, found by its file name, which begins with the study's name."""
    names = sorted(module.name for module in pkgutil.iter_modules(figures.__path__))
    owners = {name: name.split("_")[0] for name in names}
    return {study: import_module(f"{figures.__name__}.{name}") for name, study in owners.items() if study in STUDIES}


_MODULES = study_modules()
FIGURES: Mapping[str, tuple[Draw, ...]] = {study: module.FIGURES for study, module in _MODULES.items()}
TABLES: Mapping[str, tuple[Tabulate, ...]] = {study: module.TABLES for study, module in _MODULES.items()}
COMPARISONS: Mapping[str, Compare] = {study: module.comparison for study, module in _MODULES.items()}
# These two belong to no study.
OVERVIEW: Draw = overview_fig2_table2.fig_method_overview
INDEX: Tabulate = overview_fig2_table2.tab_experiment_index


def draw(make: Draw, found: Collected, folder: Path) -> tuple[Picture, list[Path]]:
    """Draw one figure and write it as SVG and PNG; the same records give the same bytes."""
    with style():
        picture = make(found)
        return picture, save(picture.figure, folder / picture.label.replace(":", "-"))
