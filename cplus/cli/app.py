"""The command line: each verb is a file under `cplus/commands`."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from cplus import __version__
from cplus.base.terminal import clean, console, output
from cplus.distributed import processes as world

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Fine-tune a language model without breaking it.",
)


class Command(TyperCommand):
    """A command that knows the option names of other trainers and names its own instead."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; only one of them can use several processes."""
        if (processes := world.started()[1]) > 1 and self.name not in _TOGETHER:
            raise ValueError(
                f"expected one process, got {processes}: cplus {self.name} runs in one alone; start it without torchrun"
            )
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from cplus.jobs.settings import OTHER_NAMES

        known = {option for parameter in self.params for option in parameter.opts}
        for option in (arg.partition("=")[0] for arg in args if arg.startswith("--") and arg != "--"):
            own = {**OTHER_NAMES, **_OTHER_OPTIONS}.get(option[2:].replace("-", "_"))
            if option in known or own is None:
                continue
            if f"--{own.replace('_', '-')}" in known:
                raise typer.BadParameter(f"there is no option {option}; did you mean --{own.replace('_', '-')}?")
            if own in known:
                raise typer.BadParameter(f"there is no option {option}; give the {own} as an argument, without a name")
        return super().parse_args(ctx, args)


_TOGETHER = ("adapt",)
"""Commands that several processes can run together."""
_OTHER_OPTIONS = {"model": "model", "resume_from_checkpoint": "resume", "overwrite_output_dir": "force"}
"""Options of other trainers that are no settings here."""


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


def register() -> None:
    """Every verb; their files import nothing heavy until they run."""
    from cplus.cli.adapt import adapt
    from cplus.cli.audit import audit
    from cplus.cli.check import check
    from cplus.cli.config import config
    from cplus.cli.data import data
    from cplus.cli.demo import demo
    from cplus.cli.doctor import doctor
    from cplus.cli.evaluate import evaluate
    from cplus.cli.export import export
    from cplus.cli.ledger import ledger
    from cplus.cli.methods import methods
    from cplus.cli.preview import preview
    from cplus.cli.probe import probe
    from cplus.cli.receipt import receipt
    from cplus.cli.repair import repair
    from cplus.cli.report import report
    from cplus.cli.split import split
    from cplus.cli.study import study
    from cplus.cli.update import update

    for command in (
        demo,
        preview,
        adapt,
        update,
        repair,
        receipt,
        check,
        probe,
        audit,
        split,
        evaluate,
        export,
        methods,
        config,
        study,
        report,
        doctor,
    ):
        app.command(cls=Command)(command)
    app.add_typer(ledger, name="ledger")
    app.add_typer(data, name="data")


def main() -> None:
    """Run the command line; an expected error is one sentence on standard error and exit code 1."""
    console.quiet = output.quiet = world.started()[0] > 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a locale without UTF-8 cannot write is escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        if not app.registered_commands:  # a script may call this more than once
            register()
        app()
    except (ValueError, TypeError, OSError, ArithmeticError, ImportError) as error:
        if os.environ.get("CPLUS_DEBUG"):
            raise
        console.print("error:", style="bold red", end=" ")
        console.print(clean(world.named(str(error))), markup=False, soft_wrap=True)
        if not console.quiet:
            world.tell_launcher(clean(world.named(str(error))))
        sys.exit(1)
    except world.Elsewhere:
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("stopped")
        sys.exit(130)
