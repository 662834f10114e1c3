"""The report of all studies as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cplus.experiment.record import RunSpec
from cplus.files import write_text
from cplus.receipts.html import environment, policy
from cplus.receipts.page import cost, scaled
from cplus.studies import Row, Spec
from cplus.studies.collected import Answered, Collected
from cplus.studies.figures.beside import Beside, beside
from cplus.studies.figures.catalogue import FIGURES, INDEX, OVERVIEW, TABLES, Draw, draw
from cplus.studies.figures.drawing import Picture, inline, method_name
from cplus.studies.figures.tables import Table
from cplus.studies.summaries import shown

PAGE = "index.html"


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A figure in its place on the page."""

    picture: Picture
    svg: Markup
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """All that the page says of one study."""

    own: Answered
    command: str
    beside: Sequence[Beside]
    figures: Sequence[Drawn]
    tables: Sequence[Table]
    everything: Sequence[tuple[tuple[str, ...], list[list[str]]]]
    missing: Sequence[str]
    seeds: str
    costs: Sequence[tuple[str, str]]


def write_report(found: Collected, folder: Path) -> dict[str, Any]:
    """Write the page and its figures into a folder; what the page says, as a JSON object."""
    opening = _drawn(OVERVIEW, found, folder)
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
        "strange": found.strange,
        "verdict": found.verdict,
        "studies": {name: _row(section) for name, section in sections.items()},
    }


def _drawn(make: Draw, found: Collected, folder: Path) -> Drawn:
    picture, paths = draw(make, found, folder / "figures")
    svg = inline(paths[0].read_text(encoding="utf-8"), paths[0].stem)
    files = tuple(str(path.relative_to(folder)) for path in paths)
    return Drawn(picture=picture, svg=Markup(svg), files=files)  # our own drawing; its texts are paths or escaped


def _section(name: str, found: Collected, folder: Path) -> Section:
    own = found.studies[name]
    return Section(
        own=own,
        command=found.command(name),
        beside=beside(name, found),
        figures=[_drawn(make, found, folder) for make in FIGURES.get(name, ())],
        tables=[make(found) for make in TABLES.get(name, ())],
        everything=everything(own.summary.rows),
        missing=[title(spec) for spec in own.missing],
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
        "beside": [asdict(each) for each in section.beside],
        "runs": len(own.specs),
        "there": len(own.results),
        "command": section.command,
    }


def everything(rows: Sequence[Row]) -> list[tuple[tuple[str, ...], list[list[str]]]]:
    """All measured figures as tables, one for each set of columns; a figure that a row lacks was not run."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.at), []).append(row)
    tables = []
    for fields, own in groups.items():
        figures = list(dict.fromkeys(name for row in own for name in row.figures))
        lines = [[*(str(row.at[f]) for f in fields), *(_precise(row, name) for name in figures)] for row in own]
        tables.append(((*(field.replace("num_", "") for field in fields), *figures), lines))
    return tables


def _precise(row: Row, name: str) -> str:
    """A figure with three decimals where it is a share, else as a person reads it; always with its seeds."""
    found = row.figures.get(name)
    if found is None:
        return "not run"
    if abs(found.mean) <= 1 and (found.error or 0.0) < 0.05:
        return f"{found.mean:.3f}" + ("" if found.error is None else f" ± {found.error:.3f}") + f" (n={found.count})"
    return f"{found.mean:,.2f}" + ("" if found.error is None else f" ± {found.error:.2f}") + f" (n={found.count})"


def title(spec: Spec) -> str:
    """A run in words."""
    where = spec.task if isinstance(spec, RunSpec) else " > ".join(spec.tasks)
    return f"{spec.method} {spec.model} {where} A={spec.num_anchors} N={spec.num_probes} seed {spec.seed}"


def _costs(own: Answered) -> list[tuple[str, str]]:
    """Time and arithmetic of the study's runs, those it shares with other studies included."""
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
    """What the results were made with; several values where they differ."""
    seen: dict[str, set[str]] = {}
    for own in found.studies.values():
        for result in own.results:
            made: Mapping[str, Any] = result.environment
            plain = {**{k: v for k, v in made.items() if k != "wall_seconds"}, **made.get("versions", {})}
            for name, value in plain.items():
                if not isinstance(value, Mapping) and value is not None:
                    seen.setdefault(name, set()).add(str(value))
    return [(name, ", ".join(sorted(values))) for name, values in sorted(seen.items())]
