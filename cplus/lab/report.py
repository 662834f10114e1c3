"""The report of all studies: records read by study, one self-contained page, and a table for the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cplus.base.files import write_text
from cplus.lab import SCALES, STUDIES, runs_of
from cplus.lab.drawing import CARD, INK, SOFT, draw, inline_svg, method_name, panels
from cplus.lab.runner import stored
from cplus.lab.study import ADDED_HERE, Collected, CollectedStudy, Picture, Table, run_title
from cplus.lab.summaries import shown
from cplus.receipts.page import cost, environment, policy, scaled

# The report of all studies as one self-contained page.


PAGE = "index.html"


def write_report(found: Collected, folder: Path) -> dict[str, Any]:
    """Write the page and its figures into a folder, and return its content as a JSON object."""
    opening = _page_figure(fig_method_overview, found, folder)
    sections = {name: _section(own, found, folder) for name, own in found.studies.items()}
    pages = environment()
    pages.filters |= {"shown": shown, "method": method_name}
    text = pages.get_template("studies.html").render(
        found=found,
        sections=sections,
        overview=opening,
        index=tab_experiment_index(found),
        made=_environments(found),
        policy=policy(),
    )
    write_text(folder / PAGE, text)
    drawn = [opening, *(one for each in sections.values() for one in each["figures"])]
    return {
        "page": str(folder / PAGE),
        "scale": found.scale.name,
        "figures": [file for one in drawn for file in one["files"]],
        "refused": list(found.refused),
        "unknown_records": found.unknown_records,
        "verdict": found.verdict,
        "studies": {
            name: {
                "question": own.study.question,
                "verdict": own.verdict,
                **own.summary.row(),
                "comparison": [asdict(line) for line in sections[name]["comparison"]],
                "runs": len(own.specs),
                "there": len(own.results),
                "command": sections[name]["command"],
            }
            for name, own in found.studies.items()
        },
    }


def _page_figure(make: Callable[[Collected], Picture], found: Collected, folder: Path) -> dict[str, Any]:
    """A figure on the page, and its files."""
    picture, paths = draw(make, found, folder / "figures")
    svg = inline_svg(paths[0].read_text(encoding="utf-8"), paths[0].stem)
    files = [str(path.relative_to(folder)) for path in paths]
    return {"picture": picture, "svg": Markup(svg), "files": files}  # drawn here; its texts are paths or escaped


def _section(own: CollectedStudy, found: Collected, folder: Path) -> dict[str, Any]:
    """The part of the page about one study."""
    done, sums = {result.spec for result in own.results}, Counter[str]()
    for result in own.results:
        sums.update(result.cost)
    wall = sum(float(result.environment.get("wall_seconds", result.seconds)) for result in own.results)
    costs = {  # of all runs, including those shared with other studies
        "time of all runs, one after another": cost("wall_seconds", wall),
        "training": scaled(sums["training_flops"], "FLOP"),
        "preservation": scaled(sums["preservation_flops"], "FLOP"),
        "rows trained on": f"{sums['training_rows']:,}",
        "rows of evidence": f"{sums['preservation_rows']:,}",
    }
    return {
        "own": own,
        "command": found.command(own.study.name),
        "comparison": own.study.comparison(found),
        "figures": [_page_figure(make, found, folder) for make in own.study.figures],
        "tables": [make(found) for make in own.study.tables],
        "missing": [run_title(spec) for spec in own.specs if spec not in done],
        "seeds": ", ".join(str(seed) for seed in sorted({result.spec.seed for result in own.results})) or "none",
        "costs": list(costs.items()) if done else [],
    }


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


# The summary of all studies as a Markdown table, for the README.


def markdown(found: Collected) -> str:
    """One line per study: question, verdicts, the first measured and published number; then a line for all."""
    rows = [("study", "question", "verdict", "measured", "published")]
    for name, own in found.studies.items():
        first = own.study.comparison(found)[0]
        measured = f"{first.what}: {first.measured}"
        rows.append((name, own.study.question, own.verdict, measured, first.published))
    rows.append(("all", "", found.verdict, "", ""))
    lines = [" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    lines = [f"| {line} |" for line in lines]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


# The records of a folder by study; a damaged record is reported and left out.


def collect(folder: Path) -> Collected:
    """Read every study's results from a folder named after their scale."""
    scale = SCALES.get(folder.resolve().name)
    if scale is None or not folder.is_dir():
        raise ValueError(
            f"{folder}: expected a folder of results named after their scale ({', '.join(SCALES)}), such as "
            "results/desk; 'cplus study run all' writes one"
        )
    specs = {name: tuple(runs_of(study, scale)) for name, study in STUDIES.items()}
    found, damaged = stored(folder)
    unknown = len(found.keys() - {spec for own in specs.values() for spec in own})
    if len(found) == unknown and not damaged:
        raise ValueError(f"{folder}: no result of scale {scale.name} was found; 'cplus study run all' computes them")
    studies = {}
    for name, study in STUDIES.items():
        if not specs[name] and study.paper.startswith(ADDED_HERE):
            continue  # a place is kept for what the paper has, not for what was added and this scale does not run
        own = tuple(found[spec] for spec in specs[name] if spec in found)
        studies[name] = CollectedStudy(study=study, specs=specs[name], results=own, summary=study.summary(own))
    refused = tuple(error.replace(f"{folder}/", "") for error in damaged)
    return Collected(scale=scale, folder=folder, studies=studies, refused=refused, unknown_records=unknown)


# The overview of the method (Fig. 2) and the index of the experiments (Table 2), which belong to no one study.


# Centre and text of each box; then the arrows between boxes.
_BOXES = {
    "new": (1.6, 3.3, "new data"),
    "propose": (1.6, 2.0, "optimizer proposes\n$\\delta$"),
    "past": (5.4, 3.3, "anchors + self-probes\nof the frozen model"),
    "gradient": (5.4, 2.0, "gradient $\\hat g$ of past behaviour,\nonce an epoch"),
    "gate": (
        3.5,
        0.75,
        "gate: $m_i = [\\,\\hat g_i\\,\\delta_i \\leq 0\\,]$, smoothed over steps to $\\alpha_i \\in [0, 1]$",
    ),
    "apply": (8.4, 0.75, "apply\n$\\theta_i \\leftarrow \\theta_i + \\alpha_i\\,\\delta_i$"),
}
_ARROWS = (("new", "propose"), ("past", "gradient"), ("propose", "gate"), ("gradient", "gate"), ("gate", "apply"))


def fig_method_overview(found: Collected) -> Picture:
    """The method as a drawing; it has no data.

    Paper: Fig. 2.
    """
    figure, (axis,) = panels(1, width=8.2, height=3.0)
    axis.set_axis_off()
    axis.set(xlim=(0, 11), ylim=(0.1, 3.9))
    frame = {"boxstyle": "round,pad=0.8", "ec": "#0072B2", "fc": CARD}
    boxes = {
        name: axis.text(x, y, words, ha="center", va="center", color=INK, bbox=frame)
        for name, (x, y, words) in _BOXES.items()
    }
    for start, end in _ARROWS:
        ends = {"patchA": boxes[start].get_bbox_patch(), "patchB": boxes[end].get_bbox_patch()}
        (x, y, _), (to_x, to_y, _) = _BOXES[start], _BOXES[end]
        arrow = {"arrowstyle": "-|>", "color": SOFT, "shrinkA": 3, "shrinkB": 3, **ends}
        axis.annotate("", (x if end == "gate" else to_x, to_y), (x, y), arrowprops=arrow)
    caption = (
        "CPLUS. The optimizer proposes an update from new data alone; gradients of anchors and self-probes decide, "
        "coordinate by coordinate, how much of it is applied. Nothing is replayed, nothing added or reversed."
    )
    return Picture(label="fig:method-overview", paper="Fig. 2", caption=caption, figure=figure)


def tab_experiment_index(found: Collected) -> Table:
    """The experiments with their questions, their places in the paper and their commands.

    Paper: Table 2.
    """
    return Table(
        label="tab:experiment-index",
        paper="Table 2",
        caption="Experiment index; e11 to e13 are added here.",
        columns=("ID", "Question", "Location", "Command"),
        rows=tuple(
            (name, each.study.question, each.study.paper, found.command(name)) for name, each in found.studies.items()
        ),
    )
