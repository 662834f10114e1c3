"""`cplus receipt`: what two models answer to the same rows, side by side on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cplus.base.terminal import clean, output, print_json
from cplus.cli import options as names
from cplus.cli.options import EVALUATION, Json, Require, given, with_settings
from cplus.data.readers import ENDINGS
from cplus.data.tasks import Task, load_task
from cplus.evaluation.judges import judge
from cplus.evaluation.requirements import Measured, require_possible, sentence
from cplus.jobs.settings import settings
from cplus.receipts.page import PAGE, from_json, read_record, write_receipt
from cplus.receipts.verdict import lead, sentences


@with_settings(("judge",), EVALUATION)
def receipt(
    before: Annotated[str | None, typer.Argument(help="The model before: hub id, folder, GGUF file or name.")] = None,
    after: Annotated[str | None, typer.Argument(help="The model after.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Rows to evaluate both on: a file or a named task; repeatable.", autocompletion=names.tasks),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for receipt.html and record.json.")] = Path("receipt"),
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of each data set.")] = None,
    require: Require = None,
    verify: Annotated[Path | None, typer.Option(help="Check the receipt in a folder and do nothing else.")] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Evaluate two models on the same rows and write what changed as one page, or verify a receipt."""
    if verify is not None:
        record = read_record(verify)
        from_json(record, where=str(verify))
        show(record, _more(record, verify), json=json)
        return
    if before is None or after is None or not data:
        raise ValueError("expected two models and --data, or --verify and a folder; see 'cplus receipt --help'")
    asked = {"model": before, "split": data[0], "require": require or (), "abilities": ("none",)}
    config = settings({**given(options, EVALUATION), **asked})
    tasks = _named([load_task(name, config.data_dir) for name in data])
    for one in config.requirements:  # at best every answer is right, and no model is loaded for less
        parts = []
        for task in tasks:
            count, free = len(task.examples[:limit]), (config.interface or task.interface) == "freeform"
            right = None if free and judge(config.judge) is None else count if one.metric == "retention" else 0
            parts.append(Measured(kind="task", rows=count, right=right, scored=count if free else 0))
        require_possible([one], parts)
    check_out(out)

    from cplus.jobs.check import compare_models, given_rows

    used = ("judge", "interface", "max_new_tokens", "plain", "too_long", "compute_dtype")
    shown = {name: getattr(config, name) for name in used}
    shown |= {"limit": limit, "data": {task.name: task.fingerprint for task in tasks}}
    title = f"{after} compared with {before}"
    record = write_receipt(compare_models(before, after, given_rows(tasks, limit, config), config, shown, title), out)
    show(record, _more(record, out), json=json)
    exit_if_unmet(record)


def _named(tasks: Sequence[Task]) -> list[Task]:
    """The tasks under the names the page shows: a file's without its folder, where that tells them apart."""
    given = [task.name for task in tasks]
    short = [Path(name).name if Path(name).suffix in ENDINGS else name for name in given]
    names = short if len(set(short)) == len(short) else given
    if len(set(names)) < len(names):
        raise ValueError(f"expected each --data once, got {max(names, key=names.count)} more than once")
    return [replace(task, name=name) for task, name in zip(tasks, names, strict=True)]


def _more(record: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return {"page": str(folder / PAGE), "sha256": record["sha256"], "figures": record["figures"]}


def check_out(out: Path | None) -> None:
    """Refuse a job's folder, whose record would be replaced."""
    if out is not None and (out / "settings.json").exists():
        raise ValueError(f"{out}: holds a job and its own record; choose another --out")


def show(record: Mapping[str, Any], more: Mapping[str, Any], *, json: bool) -> None:
    """Print a comparison."""
    figures = record["figures"]
    said = [*lead(figures), *sentences(figures), *record["notes"]]
    if json:
        print_json({"verdict": said, **more})
    else:
        page = [more["page"]] if "page" in more else []
        for text in (*said, *(sentence(one) for one in figures["requirements"]), *page):
            output.print(clean(text).replace("\u00a0", " "), soft_wrap=True)


def exit_if_unmet(record: Mapping[str, Any]) -> None:
    """End with exit code 2 if a requirement is not met."""
    if not all(one["met"] for one in record["figures"]["requirements"]):
        raise typer.Exit(2)
