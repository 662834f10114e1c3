"""`cplus data`: the paper's four categorical sets, built, verified and listed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cplus.cli.options import Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cplus.lab.paper_sets import SetAtHand


_DIFFERENT = 2

data = typer.Typer(no_args_is_help=True, help="Build, verify or list the paper's four multiple-choice sets.")

Names = Annotated[list[str] | None, typer.Argument(help="csqa, arc_c, mmlu or medqa; by default all four.")]
Folder = Annotated[Path | None, typer.Option(help="Folder with csqa.jsonl and so on; by default CPLUS_DATA.")]


@data.command("build")
def build_sets(names: Names = None, data_dir: Folder = None, json: Json = False) -> None:
    """Select the paper's rows from a folder, or from the hub if there is none, check them and cache them."""
    from cplus.lab.paper_sets import build

    _show([build(name, data_dir) for name in _known(names)], json=json)


@data.command("verify")
def verify_sets(names: Names = None, data_dir: Folder = None, json: Json = False) -> None:
    """Compare the rows at hand with the paper's; one line for each. Exit code 0: the same rows. 2: others or none."""
    from cplus.lab.paper_sets import at_hand

    found = [at_hand(name, data_dir) for name in _known(names)]
    _show(found, json=json)
    if not all(each.same for each in found):
        raise typer.Exit(_DIFFERENT)


@data.command("list")
def list_sets(data_dir: Folder = None, json: Json = False) -> None:
    """List the four sets: their rows and hashes, and where their rows are."""
    from cplus.base.terminal import output
    from cplus.lab.paper_sets import at_hand, paper_sets

    found = [at_hand(name, data_dir) for name in paper_sets()]
    if json:
        _show(found, json=True)
        return
    for each in found:
        known = paper_sets()[each.name]
        where = "not at hand" if each.where is None else str(each.where)
        output.print(
            f"{each.name:6} {len(known.rows):5,} rows  sha256 {known.sha256}  {where}", markup=False, soft_wrap=True
        )


def _known(names: Sequence[str] | None) -> list[str]:
    """The names of sets; an unknown one is an error."""
    from cplus.lab.paper_sets import paper_sets

    if unknown := [name for name in names or () if name not in paper_sets()]:
        raise ValueError(
            f"expected some of {', '.join(paper_sets())}, got {unknown[0]!r}; 'cplus data list' lists them"
        )
    return list(names or paper_sets())


def _show(found: Sequence[SetAtHand], *, json: bool) -> None:
    from cplus.base.terminal import clean, output, print_json

    if json:
        print_json({"sets": [each.row() for each in found], "same": all(each.same for each in found)})
        return
    for each in found:
        output.print(clean(str(each)), markup=False, soft_wrap=True)
