"""`cplus check`: what a fine-tuned model lost, ability by ability, without any data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cplus.base.terminal import print_table
from cplus.cli.options import Device, Json, Require, given, with_settings
from cplus.cli.receipt import check_out, exit_if_unmet, show
from cplus.evaluation.abilities import CODE, MEASURED, STYLE, THINKING, Line, chosen
from cplus.evaluation.requirements import Measured, require_possible
from cplus.jobs.settings import settings
from cplus.models.names import check_name, is_address
from cplus.receipts.page import to_json, write_record

_SETTINGS = ("abilities", "plain", "seed")
_MODEL = "alias, hub id, folder, GGUF file, folder of a LoRA adapter, or address of an OpenAI-compatible server"
_COLUMNS = ("ability", "before", "after", "lost", "gained", "change", "from", "to", "sees", "verdict")


def _row(line: Line) -> tuple[str, ...]:
    """One line of the verdict, in points of its requests; `sees` is the smallest loss that could be called damage."""
    before, kept = (line["kept"]["total"], line["kept"]["right"]) if line["kept"] else (0, 0)
    least = 100 * line["needed"] / line["rows"]
    points = (f"{round(-value):+d}" for value in (line["net"], line["high"], line["low"], least))
    counts = map(str, (before, kept + line["gained"], line["lost"], line["gained"]))
    return line["name"], *counts, *points, line["verdict"]


@with_settings(("abilities",), _SETTINGS)
def check(
    base: Annotated[str, typer.Argument(help=f"The model before fine-tuning: {_MODEL}.")],
    tuned: Annotated[str, typer.Argument(help="The fine-tuned model, by whichever trainer; as the base.")],
    num_probes: Annotated[int, typer.Option(min=2, help="Number of requests that the base model writes.")] = 24,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Also run the code that models write, apart, and judge it by tests.")
    ] = False,
    require: Require = None,
    out: Annotated[Path | None, typer.Option(help="Folder for receipt.html and record.json; none by default.")] = None,
    device: Device = "auto",
    json: Json = False,
    **options: Any,
) -> None:
    """Compare a fine-tuned model with its base: named abilities, and requests that the base model writes itself.

    Exit code 0: done, every requirement met. 2: a requirement not met. 1: an error.
    """
    apart = is_address(base) or is_address(tuned)
    # A server's template is not known, so thoughts are asked of it only by name.
    unasked = {*((STYLE, THINKING) if apart else ()), *(() if run_code else (CODE,))}
    default = tuple(name for name in MEASURED if name not in unasked)
    values = {"abilities": default, **given(options, _SETTINGS)}
    config = settings({**values, "model": base, "new": tuned, "device": device, "require": require or ()})
    names = chosen(config.abilities)
    if CODE in names and not run_code:
        raise ValueError("code that a model wrote runs only with --run-code; add it, or leave the ability code out")
    written = 0 if apart else num_probes
    require_possible(config.requirements, [Measured(kind="retention", rows=written, scored=written)] if written else [])
    check_out(out)
    for name in (base, tuned):
        check_name(name, checked=True)
    if run_code:
        from cplus.evaluation import sandbox

        if (problem := sandbox.why_not()) is not None:
            raise ValueError(problem)

    from cplus.jobs.check import compare_models, written_rows

    shown = {"num_probes": num_probes, "seed": config.seed, "abilities": names}
    title = f"{tuned} checked against {base}"
    receipt = compare_models(base, tuned, written_rows(num_probes, config), config, shown, title, names)
    record = to_json(receipt)
    if out is not None:
        record = write_record(record, out)
    figures = record["figures"]
    changed = [row for own in record["receipt"]["sets"] for row in own["rows"] if row["before"] != row["after"]]
    past = figures["free"]["past"]
    if not json and figures["lines"]:
        print_table(_COLUMNS, map(_row, figures["lines"]), left=_COLUMNS[-1:])
    show(
        record,
        {
            "kept": figures["verdict"],
            "lines": figures["lines"],
            "loss": past and past["loss"],
            "divergence": figures["divergence"],
            "requirements": figures["requirements"],
            "changed": [{key: row[key] for key in ("id", "input", "before", "after")} for row in changed],
        },
        json=json,
    )
    exit_if_unmet(record)
