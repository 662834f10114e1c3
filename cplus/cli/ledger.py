"""`cplus ledger`: show, verify or restore the stages of an updated model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cplus.cli.options import Json

_CHANGED = 2

ledger = typer.Typer(no_args_is_help=True, help="Show, verify or restore the stages of 'cplus update'.")

Root = Annotated[Path, typer.Argument(help="Folder of the ledger.")]


@ledger.command("show")
def show_stages(root: Root, json: Json = False) -> None:
    """Print the accuracy of every task after every stage, its average, backward transfer and survival."""
    from cplus.base.terminal import print_json
    from cplus.cli.update import show
    from cplus.jobs.update import read, report

    told = report(read(root))
    print_json(told) if json else show(told)


@ledger.command("verify")
def verify(root: Root, json: Json = False) -> None:
    """Check every file and the chain of stages. Exit code 0: unchanged. 2: something was changed."""
    from cplus.base.terminal import clean, output, print_json
    from cplus.jobs.update import problems, read

    found = read(root)
    wrong = problems(found)
    if json:
        print_json({"ledger": str(root), "stages": len(found.entries), "head": found.head, "problems": wrong})
    else:
        for sentence in wrong:
            output.print(clean(sentence), markup=False, soft_wrap=True)
        state = f"{len(wrong)} problems" if wrong else "as it was sealed"
        output.print(f"{len(found.entries)} stages, {state}; head {found.head}", markup=False, soft_wrap=True)
    if wrong:
        raise typer.Exit(_CHANGED)


@ledger.command("restore")
def restore_stage(
    root: Root,
    stage: Annotated[int, typer.Argument(help="Number of the stage, from 1.")],
    out: Annotated[Path, typer.Option(help="A new folder for the stage's model.")],
) -> None:
    """Copy the model of an unchanged stage into a folder that plain transformers loads."""
    from cplus.base.terminal import console
    from cplus.jobs.update import read, restore

    restore(read(root), stage, out)
    console.print(f"stage {stage} is in {out}", markup=False, soft_wrap=True)
