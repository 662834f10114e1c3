"""The command line: each verb is a file under `cplus/commands`."""

from __future__ import annotations

import os
import sys

import typer

from cplus.terminal import clean, console

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Fine-tune a language model without breaking it.",
)


def register() -> None:
    """Every verb; their files import nothing heavy until they run."""
    from cplus.commands.adapt import adapt
    from cplus.commands.audit import audit
    from cplus.commands.config import config
    from cplus.commands.demo import demo
    from cplus.commands.doctor import doctor
    from cplus.commands.evaluate import evaluate
    from cplus.commands.ledger import ledger
    from cplus.commands.methods import methods
    from cplus.commands.preview import preview
    from cplus.commands.probe import probe
    from cplus.commands.receipt import receipt
    from cplus.commands.report import report
    from cplus.commands.split import split
    from cplus.commands.study import study
    from cplus.commands.update import update

    for command in (
        demo,
        preview,
        adapt,
        update,
        receipt,
        probe,
        audit,
        split,
        evaluate,
        methods,
        config,
        study,
        report,
        doctor,
    ):
        app.command()(command)
    app.add_typer(ledger, name="ledger")


def main() -> None:
    """Run the command line; an expected error is one sentence on standard error and exit code 1."""
    register()
    if os.environ.get("CPLUS_DEBUG"):
        app()
    try:
        app()
    except (ValueError, TypeError, OSError, ArithmeticError, ImportError) as error:
        console.print("error:", style="bold red", end=" ")
        console.print(clean(str(error)), markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("stopped")
        sys.exit(130)
