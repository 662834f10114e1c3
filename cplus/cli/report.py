"""`cplus report`: the studies' results as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[Path, typer.Option(help="A folder of results, named after its scale.")] = Path("results/desk"),
    out: Annotated[Path, typer.Option(help="The folder for index.html and its figures.")] = Path("report"),
    readme: Annotated[
        bool, typer.Option("--readme", help="Print the summary as a Markdown table, and write nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Write all studies as one page: question, answer, figures, tables with the published numbers, and cost."""
    from cplus.base.terminal import clean, console, output, print_json
    from cplus.lab.report import collect

    if readme and json:
        raise ValueError("expected only one of --readme and --json")
    found = collect(results)
    if readme:
        from cplus.lab.report import markdown

        print(markdown(found), end="")
    else:
        from cplus.lab.report import write_report

        record = write_report(found, out)
        if json:
            print_json(record)
        else:
            there = sum(bool(own.results) for own in found.studies.values())
            output.print(f"{there} of {len(found.studies)} studies: {record['page']}", markup=False, soft_wrap=True)
    for sentence in found.refused:
        console.print(f"refused: {clean(sentence)}", markup=False, soft_wrap=True)
    if found.refused:
        raise ValueError(f"{len(found.refused)} results were refused, the others are shown. First: {found.refused[0]}")
