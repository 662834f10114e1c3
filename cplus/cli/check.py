"""`cplus check`: what a fine-tuned model lost, without any data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cplus.cli import options as names
from cplus.cli.options import Device, Json, Require, given, with_settings
from cplus.cli.receipt import check_out, exit_if_unmet, show
from cplus.evaluation.requirements import Measured, require_possible
from cplus.jobs.settings import settings
from cplus.receipts.page import to_json, write_record

_SETTINGS = ("plain", "seed")


@with_settings((), _SETTINGS)
def check(
    base: Annotated[str, typer.Argument(help="The model before fine-tuning: alias, hub id, folder or GGUF file.")],
    tuned: Annotated[str, typer.Argument(help="The fine-tuned model, by whichever trainer.")],
    num_probes: Annotated[int, typer.Option(min=2, help="Number of requests that the base model writes.")] = 24,
    require: Require = None,
    out: Annotated[Path | None, typer.Option(help="Folder for receipt.html and record.json; none by default.")] = None,
    device: Device = "auto",
    json: Json = False,
    **options: Any,
) -> None:
    """Compare a fine-tuned model with its base on requests that the base model writes itself; no data is needed.

    Exit code 0: done, every requirement met. 2: a requirement not met. 1: an error.
    """
    asked = {"model": base, "new": tuned, "device": device, "require": require or ()}
    config = settings({**given(options, _SETTINGS), **asked})
    require_possible(config.requirements, [Measured(kind="retention", rows=num_probes, scored=num_probes)])
    check_out(out)
    for name in (base, tuned):
        names.check({"model": name})

    from cplus.jobs.check import compare_models, written_rows

    shown = {"num_probes": num_probes, "seed": config.seed}
    title = f"{tuned} checked against {base}"
    record = to_json(compare_models(base, tuned, written_rows(num_probes, config), config, shown, title))
    if out is not None:
        record = write_record(record, out)
    figures = record["figures"]
    changed = [row for own in record["receipt"]["sets"] for row in own["rows"] if row["before"] != row["after"]]
    show(
        record,
        {
            "kept": figures["verdict"],
            "lines": figures["lines"],
            "loss": figures["free"]["past"]["loss"],
            "divergence": figures["divergence"],
            "requirements": figures["requirements"],
            "changed": [{key: row[key] for key in ("id", "input", "before", "after")} for row in changed],
        },
        json=json,
    )
    exit_if_unmet(record)
