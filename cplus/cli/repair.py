"""`cplus repair`: undo after training what past behaviour needs most, and report base, tuned and repaired model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cplus.cli import options as names
from cplus.cli.adapt import conclude, interruptible
from cplus.cli.options import Json, OptionalModel, given, with_settings
from cplus.jobs.settings import OWN, RUN_CODE, SHARED, RepairConfig, repair_settings
from cplus.models.names import check_name as check_model


@with_settings(
    ("new", "anchors", "past", "interface", "by", "tolerance", "out", "require"), (*SHARED, *OWN), RepairConfig
)
def repair(
    base: OptionalModel = None,
    tuned: Annotated[
        str | None,
        typer.Argument(help="The fine-tuned model: alias, hub id, folder, or folder of a LoRA adapter."),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the interrupted repair in this folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the job in the output folder.")] = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Undo the part of a fine-tuning that broke past behaviour and keep what was learned, without training.

    Exit code 0: done, every requirement met. 2: done, a requirement not met. 1: an error. 130, 143: stopped, saved.
    """
    chosen = given(options, RepairConfig.model_fields, model=base, tuned=tuned)
    if resume is None:
        asked = repair_settings(chosen)
        names.check({"model": asked.model, **{name: getattr(asked, name) for name in ("new", "anchors", "past")}})
        path = Path(asked.tuned).expanduser()
        if (path / "model" / "config.json").is_file() and not (path / "config.json").is_file():
            raise ValueError(
                f"{asked.tuned}: expected a model, got the folder of a job; did you mean {path / 'model'}?"
            )
        if not (path / "adapter_config.json").is_file():
            check_model(asked.tuned)
    elif chosen.keys() - set(RUN_CODE) or force:
        raise ValueError("--resume uses the settings the repair started with; leave out the others")

    from cplus.jobs import repair as job

    with interruptible():
        outcome = job.repair(asked, force=force) if resume is None else job.resume(resume, repeated=chosen)
    found = outcome.record["figures"]["repair"]
    own = {name: outcome.record[name] for name in ("repair", "counts", "seconds", "notes")}
    conclude(outcome, {"models": found["rows"], "helped": found["helped"], **own}, json=json)
