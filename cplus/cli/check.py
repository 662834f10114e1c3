"""`cplus check`: what a fine-tuned model lost, without any data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cplus.base.terminal import clean, output, print_json
from cplus.cli import options as names
from cplus.cli.options import Device, Json, Require, given, with_settings
from cplus.evaluation.requirements import parse, sentence
from cplus.jobs.settings import settings
from cplus.receipts.page import to_json, write_receipt
from cplus.receipts.verdict import lead, sentences

_SETTINGS = ("plain", "seed")


@with_settings((), _SETTINGS)
def check(
    base: Annotated[str, typer.Argument(help="The model before fine-tuning: alias, hub id, folder or GGUF file.")],
    tuned: Annotated[str, typer.Argument(help="The fine-tuned model, by whichever trainer.")],
    num_probes: Annotated[int, typer.Option(min=2, help="Number of requests that the base model writes.")] = 24,
    require: Require = None,
    out: Annotated[Path | None, typer.Option(help="Folder for receipt.html and receipt.json; none by default.")] = None,
    device: Device = "auto",
    json: Json = False,
    **options: Any,
) -> None:
    """Compare a fine-tuned model with its base on requests that the base model writes itself; no data is needed.

    Exit code 0: done, every requirement met. 2: a requirement not met. 1: an error.
    """
    config = settings({"new": tuned, **given(options, _SETTINGS), "model": base})
    names.check({"model": base})
    names.check({"model": tuned})

    from cplus.jobs import check as comparing

    asked = comparing.Checking(
        num_probes=num_probes,
        seed=config.seed,
        plain=config.plain,
        device=device,
        requirements=tuple(parse(text) for text in require or ()),
    )
    found = comparing.check(base, tuned, asked)
    record = to_json(found) if out is None else write_receipt(found, out)
    figures = record["figures"]
    said = [*lead(figures), *sentences(figures), *record["notes"]]
    if json:
        past = figures["free"]["past"]
        changed = [row for own in record["sets"] for row in own["rows"] if row["before"] != row["after"]]
        print_json(
            {
                "verdict": said,
                "effect": past["effect"],
                "loss": past["loss"],
                "answers": past["answers"],
                "requirements": figures["requirements"],
                "changed": [{key: row[key] for key in ("id", "input", "before", "after")} for row in changed],
            }
        )
    else:
        for text in (*said, *(sentence(one) for one in figures["requirements"])):
            output.print(clean(text).replace("\u00a0", " "), soft_wrap=True)
    if not all(one["met"] for one in figures["requirements"]):
        raise typer.Exit(2)
