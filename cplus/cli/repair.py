"""`cplus repair`: undo after training what past behaviour needs most, and report base, tuned and repaired model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cplus.cli import options as names
from cplus.cli.adapt import NOT_KEPT, interruptible, show_plan
from cplus.cli.options import Json, OptionalModel, given, setting, with_settings
from cplus.jobs.settings import RUN_CODE, SHARED, RepairConfig, repair_settings

if TYPE_CHECKING:
    from cplus.jobs.folder import FinishedJob


@with_settings(SHARED)
def repair(
    base: OptionalModel = None,
    tuned: Annotated[
        str | None,
        typer.Argument(help="The fine-tuned model: alias, hub id, folder, or folder of a LoRA adapter."),
    ] = None,
    tolerance: Annotated[float | None, setting("tolerance", RepairConfig)] = None,
    rounds: Annotated[int | None, setting("rounds", RepairConfig)] = None,
    max_rows: Annotated[int | None, setting("max_rows", RepairConfig)] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the interrupted repair in this folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the job in the output folder.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print what the repair will need, and stop.")] = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Undo the part of a fine-tuning that broke past behaviour and keep what was learned, without training.

    Exit code 0: done, every requirement met. 2: done, a requirement not met. 1: an error. 130, 143: stopped, saved.
    """
    chosen = given(options, model=base, tuned=tuned, tolerance=tolerance, rounds=rounds, max_rows=max_rows)
    if resume is None:
        asked = repair_settings(chosen)
        names.check({"model": asked.model, **{name: getattr(asked, name) for name in ("new", "anchors", "past")}})
        names.check_tuned(asked.tuned)
    elif chosen.keys() - set(RUN_CODE) or force or plan:
        raise ValueError("--resume uses the settings the repair started with; leave out the others")

    from cplus.base.terminal import print_json
    from cplus.jobs import plan as planning
    from cplus.jobs import repair as run

    with interruptible():
        if plan:
            show_plan(planning.plan_repair(asked), json=json)
            return
        outcome = run.repair(asked, force=force) if resume is None else run.resume(resume, repeated=chosen)
    print_json(_row(outcome)) if json else _show(outcome)
    if not outcome.kept:
        raise typer.Exit(NOT_KEPT)


def _row(outcome: FinishedJob) -> dict[str, Any]:
    record = outcome.record
    figures = {
        name: record["figures"][name] for name in ("retention", "acquisition", "validation", "free", "requirements")
    }
    return {
        "out": str(outcome.folder),
        "kept": outcome.kept,
        **figures,
        "models": record["figures"]["repair"]["rows"],
        "helped": record["figures"]["repair"]["helped"],
        **{name: record[name] for name in ("repair", "counts", "actual", "notes")},
    }


def _show(outcome: FinishedJob) -> None:
    from cplus.base.terminal import clean, output
    from cplus.evaluation.requirements import sentence
    from cplus.receipts.figures import shown
    from cplus.receipts.verdict import headline, sentences

    figures: Mapping[str, Any] = outcome.record["figures"]
    output.print(clean(headline(figures)), style="bold", markup=False, soft_wrap=True)
    for row in figures["repair"]["rows"]:
        values = ", ".join(f"{name} {shown(row, row[name])}" for name in ("base", "tuned", "repaired"))
        output.print(clean(f"{row['name']}: {row['quantity']} {values}"), markup=False, soft_wrap=True)
    for line in (*sentences(figures), *(sentence(one) for one in figures["requirements"])):
        output.print(clean(line), markup=False, soft_wrap=True)
    output.print(f"receipt: {outcome.folder / 'receipt.html'}", markup=False, soft_wrap=True)
