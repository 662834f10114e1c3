"""`cplus config`: the settings, as JSON Schema or as a YAML file to start from."""

from __future__ import annotations

from typing import Annotated

import typer


def config(
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the settings.")] = False,
    example: Annotated[bool, typer.Option("--example", help="Print a YAML file with every setting.")] = False,
) -> None:
    """Print the settings of 'cplus adapt': --schema as JSON Schema, --example as a YAML file to start from."""
    from cplus.base.terminal import print_json
    from cplus.jobs import settings

    if schema == example:
        raise ValueError("expected one of --schema and --example")
    if schema:
        print_json(settings.schema())
    else:
        print(settings.example(), end="")
