"""The report of all studies as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cplus.files import write_text
from cplus.receipts.html import environment, policy
from cplus.receipts.page import cost, scaled
from cplus.studies import SummaryRow
from cplus.studies.collected import Collected, CollectedStudy
from cplus.studies.figures.catalogue import COMPARISONS, FIGURES, INDEX, OVERVIEW, TABLES, Draw, draw
from cplus.studies.figures.drawing import Picture, inline_svg, method_name
from cplus.studies.figures.tables import ComparisonLine, Table
from cplus.studies.study import run_title
from cplus.studies.summaries import shown

PAGE = "index.html"


@dataclass(frozen=True, kw_only=True)
class PageFigure:
    """A figure on the page, and its files."""

    picture: Picture
    svg: Markup
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """The part of the page about one study."""

    own: CollectedStudy
    command: str
    comparison: Sequence[ComparisonLine]
    figures: Sequence[PageFigure]
    tables: Sequence[Table]
    all_figures: Sequence[tuple[tuple[str, ...], list[list[str]]]]
    missing: Sequence[str]
    seeds: str
    costs: Sequence[tuple[str, str]]


def write_report(found: Collected, folder: Path) -> dict[str, Any]:
    """Write the page and its figures into a folder, and return its content as a JSON object."""
    opening = _page_figure(OVERVIEW, found, folder)
    sections = {name: _section(name, found, folder) for name in found.studies}
    pages = environment()
    pages.filters |= {"shown": shown, "method": method_name}
    text = pages.get_template("studies.html").render(
        found=found,
        sections=sections,
        overview=opening,
        index=INDEX(found),
        made=_environments(found),
        policy=policy(),
    )
    write_text(folder / PAGE, text)
    return {
        "page": str(folder / PAGE),
        "scale": found.scale.name,
        "figures": [
            *opening.files,
            *(file for each in sections.values() for one in each.figures for file in one.files),
        ],
        "refused": list(found.refused),
        "unknown_files": found.unknown_files,
        "verdict": found.verdict,
        "studies": {name: _row(section) for name, section in sections.items()},
    }


def _page_figure(make: Draw, found: Collected, folder: Path) -> PageFigure:
    picture, paths = draw(make, found, folder / "figures")
    svg = inline_svg(paths[0].read_text(encoding="utf-8"), paths[0].stem)
    files = tuple(str(path.relative_to(folder)) for path in paths)
    return PageFigure(picture=picture, svg=Markup(svg), files=files)  # drawn here; its texts are paths or escaped


def _section(name: str, found: Collected, folder: Path) -> Section:
    own = found.studies[name]
    return Section(
        own=own,
        command=found.command(name),
        comparison=COMPARISONS[name](found),
        figures=[_page_figure(make, found, folder) for make in FIGURES.get(name, ())],
        tables=[make(found) for make in TABLES.get(name, ())],
        all_figures=all_figures(own.summary.rows),
        missing=[run_title(spec) for spec in own.missing],
        seeds=", ".join(str(seed) for seed in sorted({result.spec.seed for result in own.results})) or "none",
        costs=_costs(own),
    )


def _row(section: Section) -> dict[str, Any]:
    """The section as a JSON object."""
    own = section.own
    return {
        "question": own.study.question,
        "verdict": own.verdict,
        **own.summary.row(),
        "comparison": [asdict(line) for line in section.comparison],
        "runs": len(own.specs),
        "there": len(own.results),
        "command": section.command,
    }


def all_figures(rows: Sequence[SummaryRow]) -> list[tuple[tuple[str, ...], list[list[str]]]]:
    """All measured figures as tables, one per set of columns; a missing figure is shown as not run."""
    groups: dict[tuple[str, ...], list[SummaryRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row.at), []).append(row)
    tables = []
    for fields, own in groups.items():
        figures = list(dict.fromkeys(name for row in own for name in row.figures))
        lines = [[*(str(row.at[f]) for f in fields), *(_precise(row, name) for name in figures)] for row in own]
        tables.append(((*(field.replace("num_", "") for field in fields), *figures), lines))
    return tables


def _precise(row: SummaryRow, name: str) -> str:
    """A figure with three decimals if it is a share, else with two; always with its number of seeds."""
    found = row.figures.get(name)
    if found is None:
        return "not run"
    if abs(found.mean) <= 1 and (found.error or 0.0) < 0.05:
        return f"{found.mean:.3f}" + ("" if found.error is None else f" ± {found.error:.3f}") + f" (n={found.count})"
    return f"{found.mean:,.2f}" + ("" if found.error is None else f" ± {found.error:.2f}") + f" (n={found.count})"


def _costs(own: CollectedStudy) -> list[tuple[str, str]]:
    """Time and FLOPs of the study's runs, including those shared with other studies."""
    if not own.results:
        return []
    sums: dict[str, int] = {}
    for result in own.results:
        for name, value in result.cost.items():
            sums[name] = sums.get(name, 0) + value
    wall = sum(float(result.environment.get("wall_seconds", result.seconds)) for result in own.results)
    return [
        ("time of all runs, one after another", cost("wall_seconds", wall)),
        ("training", scaled(sums["training_flops"], "FLOP")),
        ("preservation", scaled(sums["preservation_flops"], "FLOP")),
        ("rows trained on", f"{sums['training_rows']:,}"),
        ("rows of evidence", f"{sums['preservation_rows']:,}"),
    ]


def _environments(found: Collected) -> list[tuple[str, str]]:
    """The environments of the results; several values where they differ."""
    seen: dict[str, set[str]] = {}
    for own in found.studies.values():
        for result in own.results:
            made: Mapping[str, Any] = result.environment
            plain = {**{k: v for k, v in made.items() if k != "wall_seconds"}, **made.get("versions", {})}
            for name, value in plain.items():
                if not isinstance(value, Mapping) and value is not None:
                    seen.setdefault(name, set()).add(str(value))
    return [(name, ", ".join(sorted(values))) for name, values in sorted(seen.items())]
