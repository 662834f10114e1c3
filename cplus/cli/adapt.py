"""`cplus adapt`: learn new rows, keep what the model could do, and report both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cplus.base.terminal import clean, console, output, print_json
from cplus.cli import options as names
from cplus.cli.options import Config, Json, OptionalModel, given, with_settings
from cplus.distributed import processes
from cplus.evaluation.requirements import sentence
from cplus.jobs import settings as schemas
from cplus.jobs.settings import RUN_CODE, AdaptConfig
from cplus.receipts.figures import shown
from cplus.receipts.verdict import headline, sentences

if TYPE_CHECKING:
    from cplus.jobs.folder import FinishedJob


NOT_KEPT = 2
SHOWN = (
    "new", "anchors", "keep", "past", "validation", "interface", "judge", "method", "num_probes", "repair", "epochs",
    "stop", "batch_size", "lr", "lora", "seed", "out", "require", "compare", "device",
)  # fmt: skip
"""The settings of a first week; `--set` takes all of them."""


@with_settings(SHOWN, AdaptConfig.model_fields)
def adapt(
    model: OptionalModel = None,
    config: Config = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the interrupted job in this folder.")] = None,
    finish: Annotated[
        Path | None, typer.Option(help="Write model and receipt from the last checkpoint of the job in this folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the job in the output folder.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print what the job will need, and stop.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of all settings, and stop.")] = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Fine-tune a model on new rows without losing what it could do, with a receipt.

    Exit code 0: done, every requirement met. 2: done, a requirement not met. 1: an error. 130, 143: stopped, saved.
    """
    if schema:
        print_json(schemas.schema())
        return
    chosen = given(options, model=model)
    with interruptible(), processes.joined():
        if resume is None and finish is None:
            asked = processes.in_turn(lambda: _settings(config, chosen))
        elif resume is not None and finish is not None:
            raise ValueError("expected either --resume or --finish, got both")
        elif (
            chosen.keys() - {*RUN_CODE, *(("epochs", "compare") if finish is None else ())}
            or config is not None
            or force
            or plan
        ):
            raise ValueError(
                "--resume and --finish use the settings the job started with; leave out the others (--resume accepts "
                "--epochs and --compare), or start a new job"
            )

        from cplus.jobs import adapt as job
        from cplus.jobs.compare import compare, compare_seconds
        from cplus.jobs.plan import plan_anywhere
        from cplus.jobs.progress import duration, since_start

        if plan:
            planned = processes.shared(lambda: plan_anywhere(asked, starting=since_start()))
            print_json(planned.row) if json else output.print("\n".join(planned.lines), soft_wrap=True)
            return
        if finish is not None:
            outcome = job.finish(finish, repeated=chosen)
        elif resume is not None:
            code = {name: value for name, value in chosen.items() if name in RUN_CODE}
            outcome = job.resume(resume, epochs=chosen.get("epochs"), repeated=code)
            if chosen.get("compare"):
                outcome = compare(resume, repeated=code)
        else:
            outcome = job.adapt(asked, force=force, starting=since_start())
    figures = outcome.record["figures"]
    sets = [{k: own[k] for k in ("name", "kind", "rows", "before", "after", "nll")} for own in figures["sets"]]
    own = {name: outcome.record[name] for name in ("counts", "cost", "steps", "epochs", "unfinished", "notes")}
    if (cut := outcome.record["unfinished"]) is not None and not json:
        output.print(f"UNFINISHED: training was ended after update {cut['updates']} of {cut['planned']}.")
    if not json and outcome.record["settings"]["method"] != "sft" and figures["beside"] is None:
        console.print(
            f"what plain fine-tuning would have kept, in about {duration(compare_seconds(outcome.record))}: cplus "
            f"adapt --resume {outcome.folder} --compare sft",
            soft_wrap=True,
        )
    conclude(outcome, {"sets": sets, **own}, json=json)


def conclude(outcome: FinishedJob, more: Mapping[str, Any], *, json: bool) -> None:
    """Print the figures of a finished job and end with exit code 2 if a requirement is not met."""
    figures = outcome.record["figures"]
    requirements = figures["requirements"]
    if json:
        told = ("lines", "learned", "retention", "acquisition", "validation", "free", "beside", "requirements")
        same = {
            "out": str(outcome.folder),
            "kept": outcome.kept,
            "abilities": figures["verdict"],
            **{name: figures[name] for name in told},
        }
        print_json({**same, **more})
    else:
        output.print(clean(headline(figures)), style="bold", soft_wrap=True)
        for row in figures.get("repair", {}).get("rows", ()):
            values = ", ".join(f"{name} {shown(row, row[name])}" for name in ("base", "tuned", "repaired"))
            output.print(clean(f"{row['name']}: {row['quantity']} {values}"), soft_wrap=True)
        for line in (*sentences(figures), *(sentence(one) for one in requirements)):
            output.print(clean(line), soft_wrap=True)
        output.print(f"receipt: {outcome.folder / 'receipt.html'}", soft_wrap=True)
    if not outcome.kept:
        missed = " ".join(sentence(one) for one in requirements if not one["met"])
        processes.tell_launcher(f"{missed} See {outcome.folder / 'receipt.html'}")
        raise typer.Exit(NOT_KEPT)


def _settings(config: Path | None, chosen: Mapping[str, Any]) -> AdaptConfig:
    values = {} if config is None else schemas.read_yaml(config)
    found = schemas.settings({**values, **chosen}, where="settings" if config is None else str(config))
    names.check(found.model_dump())
    return found


@contextmanager
def interruptible() -> Iterator[None]:
    """A stopped job is reported in one line and ends with the exit code of its signal."""
    try:
        yield
    except processes.Interrupted as stop:
        console.print(str(stop), soft_wrap=True)
        raise typer.Exit(stop.exit_code) from stop
