"""The command line: each verb is a file of this folder, which imports nothing heavy until it runs."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, ClassVar

import typer

from cplus import __version__
from cplus.base.terminal import clean, console, output
from cplus.cli.adapt import adapt
from cplus.cli.check import check
from cplus.cli.demo import demo
from cplus.cli.doctor import doctor
from cplus.cli.evaluate import evaluate
from cplus.cli.export import export
from cplus.cli.methods import methods
from cplus.cli.options import Command, Group
from cplus.cli.probe import probe
from cplus.cli.receipt import receipt
from cplus.cli.repair import repair
from cplus.cli.study import study
from cplus.cli.update import update
from cplus.distributed import processes


class Verbs(Group):
    """The verbs, and where those of earlier versions are now."""

    moved: ClassVar = {
        "audit": "cplus probe audit BANK",
        "config": "cplus adapt --schema; examples/adapt.yaml is a file with every setting",
        "data": "cplus study data, with list, build or verify",
        "ledger": "cplus update LEDGER, with --show or --verify",
        "preview": "cplus adapt --plan for what a job needs, and its receipt for what it changed",
        "report": "cplus study report",
        "split": "cplus evaluate MODEL --task TASK --split FILE",
    }


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Fine-tune a language model without breaking it.\n\nBegin with 'cplus demo', or on your own rows: "
    "'cplus adapt MODEL --new new.jsonl --out out --plan'.",
)
CHECK, STUDY = "Check what was kept", "Study methods"
for panel, verbs in {
    "Train": (adapt, update),
    CHECK: (check, receipt, evaluate),
    "Mend": (repair,),
    STUDY: (demo, methods),
    "Set up and share": (doctor, export),
}.items():
    for verb in verbs:
        app.command(cls=Command, rich_help_panel=panel)(verb)
app.add_typer(probe, name="probe", rich_help_panel=CHECK)
app.add_typer(study, name="study", rich_help_panel=STUDY)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"cplus {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; an expected error is one sentence on standard error and exit code 1."""
    console.quiet = output.quiet = processes.started()[0] > 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a locale without UTF-8 cannot write is escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except (ValueError, TypeError, OSError, ArithmeticError, ImportError) as error:
        if os.environ.get("CPLUS_DEBUG"):
            raise
        console.print("error:", style="bold red", end=" ")
        console.print(clean(processes.named(str(error))), soft_wrap=True)
        if not console.quiet:
            processes.tell_launcher(clean(processes.named(str(error))))
        sys.exit(1)
    except processes.Elsewhere:
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("stopped")
        sys.exit(130)
