"""`cplus update`: one more task for a model that is updated repeatedly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cplus.cli import options as names
from cplus.cli.adapt import NOT_KEPT, interruptible
from cplus.cli.options import SETTINGS, Config, Json, given, setting, with_settings
from cplus.jobs.settings import DECIDED


@with_settings(name for name in SETTINGS if name not in DECIDED)
def update(
    ledger: Annotated[Path, typer.Argument(help="Folder of the ledger; the first update creates it.")],
    model: Annotated[
        str | None, setting("model", help="First update: alias, hub id, folder or GGUF file to start from.")
    ] = None,
    config: Config = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an update that was interrupted with other settings.")
    ] = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Adapt the ledger's last model to the next task, keep every task before it, and append the stage.

    Settings that are not given stay as in the last stage. The same command resumes an interrupted update.
    Exit code 0: done. 2: done, a requirement not met. 1: an error. 130, 143: stopped, saved.
    """
    from cplus.jobs.settings import read_yaml

    asked = {**({} if config is None else read_yaml(config)), **given(options, model=model)}
    names.check({name: asked.get(name) for name in ("model", "method", "new")})

    from cplus.base.terminal import print_json
    from cplus.jobs.update import report
    from cplus.jobs.update import update as append_stage

    with interruptible():
        done = append_stage(ledger, asked, force=force)
    told = report(done.ledger)
    print_json({**told, "kept": done.outcome.kept}) if json else show(told)
    if not done.outcome.kept:
        raise typer.Exit(NOT_KEPT)


def show(told: dict[str, Any]) -> None:
    """Print the table and its sentences."""
    from rich.table import Table

    from cplus.base.terminal import clean, output

    grid = Table(box=None, header_style="bold")
    grid.add_column("after", no_wrap=True)
    tasks = [f"{number} {clean(Path(task).stem)}" for number, task in enumerate(told["tasks"], start=1)]
    for name in (*tasks, "average", "base"):
        grid.add_column(name, justify="right", no_wrap=True)
    averages, bases = [None, *told["average_accuracy"]], [None, *told["base"]]
    for stage, cells in enumerate(told["accuracy"]):
        line = (*cells, averages[stage], bases[stage])
        grid.add_row("(base)" if stage == 0 else tasks[stage - 1], *("" if c is None else f"{c:.1f}" for c in line))
    output.print(grid)
    if told["backward_transfer"] is not None:
        output.print(f"backward transfer {told['backward_transfer']:+.1f} points")
    curve = " ".join(f"{share:.1f}" for share in told["survival"]["all"])
    output.print(f"of 100 rows correct once, still correct after 0, 1, ... further stages: {curve}")
    output.print(f"head {told['head']}", markup=False, soft_wrap=True)
