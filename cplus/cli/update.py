"""`cplus update`: one more task for a model that is updated repeatedly, and the ledger of its stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cplus.base.terminal import clean, output, print_json, print_table
from cplus.cli import options as names
from cplus.cli.adapt import NOT_KEPT, interruptible
from cplus.cli.options import Config, Json, given, with_settings
from cplus.jobs.settings import DECIDED, AdaptConfig, read_yaml

_CHANGED = 2


@with_settings(("new", "anchors", "require"), [name for name in AdaptConfig.model_fields if name not in DECIDED])
def update(
    ledger: Annotated[Path, typer.Argument(help="Folder of the ledger; the first update creates it.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="First update: alias, hub id, folder or GGUF file to start from.", autocompletion=names.models
        ),
    ] = None,
    config: Config = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an update that was interrupted with other settings.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Only print the accuracy of every task after every stage.")] = (
        False
    ),
    verify: Annotated[
        bool, typer.Option("--verify", help="Only check every file and the chain of stages; exit code 2 if changed.")
    ] = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Adapt the ledger's last model to the next task, keep every task before it, and append the stage.

    Settings that are not given stay as in the last stage. The same command resumes an interrupted update.
    Exit code 0: done. 2: done, a requirement not met. 1: an error. 130, 143: stopped, saved.
    """
    chosen = given(options, model=model)
    looks = [name for name, asked in (("show", show), ("verify", verify)) if asked]
    if len(looks) > 1 or (looks and (chosen or config or force)):
        raise ValueError(f"--{looks[0]} stands alone: it changes no ledger; leave out the other options")
    asked = {**({} if config is None else read_yaml(config)), **chosen}
    names.check({name: asked.get(name) for name in ("model", "method", "new")})

    from cplus.jobs import update as stages

    if show:
        told = stages.report(stages.read(ledger))
        print_json(told) if json else _show(told)
    elif verify:
        found = stages.read(ledger)
        wrong = stages.problems(found)
        if json:
            print_json({"ledger": str(ledger), "stages": len(found.entries), "head": found.head, "problems": wrong})
        else:
            state = f"{len(wrong)} problems" if wrong else "as it was sealed"
            for sentence in (*wrong, f"{len(found.entries)} stages, {state}; head {found.head}"):
                output.print(clean(sentence), soft_wrap=True)
        if wrong:
            raise typer.Exit(_CHANGED)
    else:
        with interruptible():
            updated, outcome = stages.update(ledger, asked, force=force)
        told = stages.report(updated)
        print_json({**told, "kept": outcome.kept}) if json else _show(told)
        if not outcome.kept:
            raise typer.Exit(NOT_KEPT)


def _show(told: dict[str, Any]) -> None:
    tasks = [f"{number} {clean(Path(task).stem)}" for number, task in enumerate(told["tasks"], start=1)]
    stages = zip(told["accuracy"], [None, *told["average_accuracy"]], [None, *told["base"]], strict=True)
    cells = [["" if c is None else f"{c:.1f}" for c in (*own, average, base)] for own, average, base in stages]
    print_table(
        ("after", *tasks, "average", "base"),
        [(after, *row) for after, row in zip(("(base)", *tasks), cells, strict=True)],
    )
    if told["backward_transfer"] is not None:
        output.print(f"backward transfer {told['backward_transfer']:+.1f} points")
    output.print(f"head {told['head']}", soft_wrap=True)
