"""`cplus update`: one more task for a model that is updated again and again."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from cplus.commands.adapt import options
from cplus.ledger import DECIDED

_NOT_KEPT = 2


def update(
    ledger: Annotated[Path, typer.Argument(help="Folder of the ledger; the first update makes it.")],
    model: Annotated[
        str | None, typer.Option(help="First update: alias, hub id, folder or GGUF file to begin with.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file of settings; options given here stand above it.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Begin anew in the place of an interrupted update with other settings.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
    **given: Any,
) -> None:
    """Adapt the ledger's last model to the next task, keep every task before it, and append the stage.

    What is not given stands as in the last stage. An interrupted update goes on with the same command.
    Exit code 0: done. 2: done, a requirement not kept. 1: an error. 130, 143: stopped, saved.
    """
    from cplus import job as jobs
    from cplus.job.settings import read_yaml
    from cplus.ledger.history import report
    from cplus.ledger.update import update as append_stage
    from cplus.terminal import console, print_json

    chosen = {name: value for name, value in given.items() if value is not None and value != []}
    chosen |= {} if model is None else {"model": model}
    try:
        done = append_stage(ledger, {**({} if config is None else read_yaml(config)), **chosen}, force=force)
    except jobs.Interrupted as stop:
        console.print(str(stop), markup=False, soft_wrap=True)
        raise typer.Exit(stop.exit_code) from stop
    told = report(done.ledger)
    if json:
        print_json({**told, "kept": done.outcome.kept})
    else:
        show(told)
    if not done.outcome.kept:
        raise typer.Exit(_NOT_KEPT)


_own = [p for p in inspect.signature(update, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
update.__signature__ = inspect.Signature([*_own, *options(DECIDED)])  # type: ignore[attr-defined]


def show(told: dict[str, Any]) -> None:
    """The table and the sentences a person reads."""
    from rich.table import Table

    from cplus.terminal import clean, output

    grid = Table(box=None, header_style="bold")
    grid.add_column("after", no_wrap=True)
    names = [f"{number} {clean(Path(task).stem)}" for number, task in enumerate(told["tasks"], start=1)]
    for name in (*names, "average", "base"):
        grid.add_column(name, justify="right", no_wrap=True)
    averages, bases = [None, *told["average_accuracy"]], [None, *told["base"]]
    for stage, cells in enumerate(told["accuracy"]):
        line = (*cells, averages[stage], bases[stage])
        grid.add_row("(base)" if stage == 0 else names[stage - 1], *("" if c is None else f"{c:.1f}" for c in line))
    output.print(grid)
    if told["backward_transfer"] is not None:
        output.print(f"backward transfer {told['backward_transfer']:+.1f} points")
    curve = " ".join(f"{share:.1f}" for share in told["survival"]["all"])
    output.print(f"of 100 rows right once, still right after 0, 1, ... further stages: {curve}")
    output.print(f"head {told['head']}", markup=False, soft_wrap=True)
