"""`cplus check`: what a fine-tuned model lost, without any data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cplus.cli import options
from cplus.cli.options import Device, Json, Plain


def check(
    base: Annotated[str, typer.Argument(help="The model before fine-tuning: alias, hub id, folder or GGUF file.")],
    tuned: Annotated[str, typer.Argument(help="The fine-tuned model, by whichever trainer.")],
    num_probes: Annotated[int, typer.Option(min=2, help="Number of requests that the base model writes.")] = 24,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer.")] = 48,
    require: Annotated[
        list[str] | None, typer.Option(help="Such as past-loss<=+0.05: exit code 2 if its 95 % bound misses it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for receipt.html and receipt.json; none by default.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the requests.")] = 0,
    plain: Plain = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Compare a fine-tuned model with its base on requests that the base model writes itself; no data is needed.

    Exit code 0: done, every requirement met. 2: a requirement not met. 1: an error.
    """
    options.check({"model": base})
    options.check({"model": tuned})

    from cplus.evaluation.requirements import parse
    from cplus.jobs.check import Checking
    from cplus.jobs.check import check as compare
    from cplus.receipts.page import to_json, write_receipt

    asked = Checking(
        num_probes=num_probes,
        answer_tokens=answer_tokens,
        seed=seed,
        plain=plain,
        device=device,
        requirements=tuple(parse(text) for text in require or ()),
    )
    found = compare(base, tuned, asked)
    record = to_json(found) if out is None else write_receipt(found, out)
    _show(record, json=json)
    if not all(one["met"] for one in record["figures"]["requirements"]):
        raise typer.Exit(2)


def _show(record: dict[str, Any], *, json: bool) -> None:
    from cplus.base.terminal import clean, output, print_json
    from cplus.evaluation.requirements import sentence
    from cplus.receipts.verdict import lead, sentences

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
        return
    for text in (*said, *(sentence(one) for one in figures["requirements"])):
        output.print(clean(text).replace("\u00a0", " "), markup=False, soft_wrap=True)
