"""`cplus adapt`: learn new data, keep what the model could do, and show both."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from cplus.job.settings import GROUPS, AdaptConfig

if TYPE_CHECKING:
    from cplus.job import Outcome

_NOT_KEPT = 2
FLAGS = {"validation": "--validate"}
"""Options whose name is not that of their setting."""


def adapt(
    model: Annotated[str | None, typer.Argument(help="Alias, hub id, folder or GGUF file.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file of settings; options given here stand above it.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the interrupted job in this folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the job that lies in the output folder.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print what the job will take, and do nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
    **given: Any,
) -> None:
    """Fine-tune a model on new data without losing what it could do, with a receipt.

    Exit code 0: done, every requirement kept. 2: done, a requirement not kept. 1: an error. 130, 143: stopped, saved.
    """
    from cplus import job as jobs
    from cplus.job.settings import read_yaml, settings
    from cplus.terminal import console, output, print_json

    chosen = {name: value for name, value in given.items() if value is not None and value != []}
    chosen |= {} if model is None else {"model": model}
    if resume is not None and (chosen or config is not None or force or plan):
        raise ValueError(
            "--resume goes on with the settings the job began with; leave the others out, or begin a new job"
        )
    try:
        if resume is not None:
            outcome = jobs.resume(resume)
        else:
            asked = settings({**({} if config is None else read_yaml(config)), **chosen}, where=_where(config))
            if plan:
                planned = jobs.plan(asked)
                print_json(planned.row()) if json else output.print(
                    "\n".join(planned.lines()), markup=False, soft_wrap=True
                )
                return
            outcome = jobs.adapt(asked, force=force)
    except jobs.Interrupted as stop:
        console.print(str(stop), markup=False, soft_wrap=True)
        raise typer.Exit(stop.exit_code) from stop
    print_json(_row(outcome)) if json else _show(outcome)
    if not outcome.kept:
        raise typer.Exit(_NOT_KEPT)


def _where(config: Path | None) -> str:
    return "settings" if config is None else str(config)


def options(left_out: Collection[str] = ()) -> list[inspect.Parameter]:
    """One option for every setting of the schema but the model, which is the argument."""
    made = []
    for group, names in GROUPS.items():
        for name in (name for name in names if name not in left_out):
            field = AdaptConfig.model_fields[name]
            default = (
                ""
                if field.default in (None, ()) or field.default is False
                else f" [dim]\\[default: {field.default}][/dim]"
            )
            flags = (FLAGS[name],) if name in FLAGS else ()
            option = typer.Option(
                *flags, help=f"{field.description}{default}", rich_help_panel=group, show_default=False
            )
            kind: Any = Annotated[_plain(field.annotation) | None, option]
            made.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind))
    return made


def _plain(annotation: Any) -> Any:
    """The type as the command line reads it; lists repeat, and what is richer is read from text by the schema."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        return list[str]
    if origin is Literal or annotation in (str, int, float, bool, Path):
        return annotation
    if origin is Annotated:
        return _plain(inner[0])
    found = [_plain(kind) for kind in inner if kind is not type(None)]
    return found[0] if found else str


_own = [p for p in inspect.signature(adapt, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
adapt.__signature__ = inspect.Signature([*_own, *options()])  # type: ignore[attr-defined]


def _row(outcome: Outcome) -> dict[str, Any]:
    record = outcome.record
    figures = {name: record["figures"][name] for name in ("retention", "acquisition", "requirements")}
    sets = [
        {k: own[k] for k in ("name", "kind", "rows", "before", "after", "nll")} for own in record["figures"]["sets"]
    ]
    return {
        "out": str(outcome.folder),
        "kept": outcome.kept,
        **figures,
        "sets": sets,
        **{name: record[name] for name in ("counts", "cost", "steps", "epochs", "notes")},
    }


def _show(outcome: Outcome) -> None:
    from cplus.receipts.verdict import headline, sentences
    from cplus.terminal import clean, output

    figures: Mapping[str, Any] = outcome.record["figures"]
    output.print(clean(headline(figures)), style="bold", markup=False, soft_wrap=True)
    for sentence in sentences(figures):
        output.print(clean(sentence), markup=False, soft_wrap=True)
    for required in figures["requirements"]:
        bound = "not measured" if required["bound"] is None else f"{required['bound']:.3f}"
        state = "kept" if required["met"] else "NOT KEPT"
        output.print(f"required {required['metric']} >= {required['at_least']:g}: {bound}, {state}", markup=False)
    output.print(f"receipt: {outcome.folder / 'receipt.html'}", markup=False, soft_wrap=True)
