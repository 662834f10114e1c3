"""The summary of all studies as a Markdown table, for the README."""

from __future__ import annotations

from collections.abc import Sequence

from cplus.studies.collected import Collected
from cplus.studies.figures.catalogue import COMPARISONS

COLUMNS = ("study", "question", "verdict", "measured", "published", "command")


def markdown(found: Collected) -> str:
    """One line per study: question, verdicts, the first measured and published number, command; then a line for all."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for name, own in found.studies.items():
        first = COMPARISONS[name](found)[0]
        cells = (
            name,
            own.study.question,
            own.verdict,
            f"{first.what}: {first.measured}",
            first.published,
            f"`{found.command(name)}`",
        )
        lines.append(_line(cells))
    lines.append(_line(("all", "", found.verdict, "", "", f"`{found.command('all')}`")))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
