"""`cplus adapt`: learn new rows, keep what the model could do, and report both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from cplus.cli import options as names
from cplus.cli.options import SETTINGS, Config, Json, OptionalModel, given, with_settings
from cplus.distributed import processes
from cplus.jobs.settings import RUN_CODE

if TYPE_CHECKING:
    from cplus.jobs.folder import FinishedJob
    from cplus.jobs.settings import AdaptConfig


NOT_KEPT = 2


@with_settings(SETTINGS)
def adapt(
    model: OptionalModel = None,
    config: Config = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the interrupted job in this folder.")] = None,
    finish: Annotated[
        Path | None, typer.Option(help="Write model and receipt from the last checkpoint of the job in this folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the job in the output folder.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print what the job will need, and stop.")] = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Fine-tune a model on new rows without losing what it could do, with a receipt.

    Exit code 0: done, every requirement met. 2: done, a requirement not met. 1: an error. 130, 143: stopped, saved.
    """
    from cplus.base.terminal import print_json

    with interruptible(), processes.joined():
        outcome = _outcome(model, config, resume, finish, options, force=force, plan=plan, json=json)
    if outcome is None:
        return
    print_json(_row(outcome)) if json else _show(outcome)
    if not outcome.kept:
        processes.tell_launcher(_missed(outcome))
        raise typer.Exit(NOT_KEPT)


def _outcome(
    model: str | None,
    config: Path | None,
    resume: Path | None,
    finish: Path | None,
    options: dict[str, Any],
    *,
    force: bool,
    plan: bool,
    json: bool,
) -> FinishedJob | None:
    """The job that the options ask for, done; None where they ask for its plan alone, which is printed."""
    chosen = given(options, model=model)
    if resume is None and finish is None:
        asked = processes.in_turn(lambda: _settings(config, chosen))
    elif chosen.keys() - {*RUN_CODE, *(("epochs",) if finish is None else ())} or config is not None or force or plan:
        raise ValueError(
            "--resume and --finish use the settings the job started with; leave out the others (--resume accepts "
            "--epochs), or start a new job"
        )
    elif resume is not None and finish is not None:
        raise ValueError("expected either --resume or --finish, got both")

    from cplus.jobs import adapt as resuming
    from cplus.jobs import adapt as run
    from cplus.jobs import plan as planning
    from cplus.jobs.progress import since_start

    if plan:
        processes.shared(lambda: show_plan(planning.plan_anywhere(asked, starting=since_start()), json=json))
        return None
    if finish is not None:
        return resuming.finish(finish, repeated=chosen)
    if resume is not None:
        return resuming.resume(resume, epochs=chosen.get("epochs"), repeated=chosen)
    return run.adapt(asked, force=force, starting=since_start())


def _settings(config: Path | None, chosen: Mapping[str, Any]) -> AdaptConfig:
    from cplus.jobs.settings import read_yaml, settings

    values, where = (chosen, "settings") if config is None else ({**read_yaml(config), **chosen}, str(config))
    found = settings(values, where=where)
    names.check(found.model_dump())
    return found


class Planned(Protocol):
    """The result of `--plan`, of a job or of a repair."""

    def row(self) -> dict[str, Any]:
        """As one JSON object."""
        ...

    def lines(self) -> list[str]:
        """In words."""
        ...


def show_plan(planned: Planned, *, json: bool) -> None:
    """Print a plan."""
    from cplus.base.terminal import output, print_json

    if json:
        print_json(planned.row())
    else:
        output.print("\n".join(planned.lines()), markup=False, soft_wrap=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """A stopped job is reported in one line and ends with the exit code of its signal."""
    from cplus.base.terminal import console
    from cplus.distributed.processes import Interrupted

    try:
        yield
    except Interrupted as stop:
        console.print(str(stop), markup=False, soft_wrap=True)
        raise typer.Exit(stop.exit_code) from stop


def _row(outcome: FinishedJob) -> dict[str, Any]:
    record = outcome.record
    figures = {
        name: record["figures"][name] for name in ("retention", "acquisition", "validation", "free", "requirements")
    }
    sets = [
        {k: own[k] for k in ("name", "kind", "rows", "before", "after", "nll")} for own in record["figures"]["sets"]
    ]
    return {
        "out": str(outcome.folder),
        "kept": outcome.kept,
        **figures,
        "sets": sets,
        **{name: record[name] for name in ("counts", "cost", "steps", "epochs", "unfinished", "notes")},
    }


def _missed(outcome: FinishedJob) -> str:
    """The requirements that are not met, in words."""
    from cplus.evaluation.requirements import sentence

    missed = [sentence(required) for required in outcome.record["figures"]["requirements"] if not required["met"]]
    return f"{' '.join(missed)} See {outcome.folder / 'receipt.html'}"


def _show(outcome: FinishedJob) -> None:
    from cplus.base.terminal import clean, output
    from cplus.evaluation.requirements import sentence
    from cplus.receipts.verdict import headline, sentences

    figures: Mapping[str, Any] = outcome.record["figures"]
    if (cut := outcome.record["unfinished"]) is not None:
        line = f"UNFINISHED: training was ended after update {cut['updates']} of {cut['planned']}."
        output.print(line, markup=False, soft_wrap=True)
    output.print(clean(headline(figures)), style="bold", markup=False, soft_wrap=True)
    for line in sentences(figures):
        output.print(clean(line), markup=False, soft_wrap=True)
    for required in figures["requirements"]:
        output.print(sentence(required), markup=False, soft_wrap=True)
    output.print(f"receipt: {outcome.folder / 'receipt.html'}", markup=False, soft_wrap=True)
