"""The reference pages of the documentation site, made from the code: commands, settings, Python API, records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

API = {
    "In your own loop": ("cplus.core.guard.protect", "cplus.core.guard.Guard", "cplus.core.optim.AdamW"),
    "Rows, probes, evaluation": (
        "cplus.jobs.api.read", "cplus.jobs.api.encode", "cplus.jobs.api.probe", "cplus.jobs.api.evaluate",
        "cplus.jobs.api.Evaluation",
        "cplus.core.rows.Encoded", "cplus.data.examples.Choice", "cplus.data.examples.FreeForm",
    ),
    "Jobs": (
        "cplus.jobs.adapt.adapt", "cplus.jobs.folder.FinishedJob", "cplus.jobs.plan.plan", "cplus.jobs.repair.repair",
        "cplus.jobs.api.receipt",
    ),
    "Methods": ("cplus.methods.table.Method", "cplus.methods.table.Past", "cplus.methods.table.Material",
                "cplus.core.gates.Proposal", "cplus.core.gates.Elementwise"),
    "Trainer, TRL, PEFT": (
        "cplus.integrations.transformers.preserve", "cplus.integrations.transformers.PreservationCallback",
        "cplus.integrations.rows.encoded",
        "cplus.integrations.rows.bank_rows",
    ),
    "Several processes": ("cplus.distributed.checkpoint.save", "cplus.distributed.checkpoint.load"),
    "JAX": (
        "cplus.integrations.optax.Loop", "cplus.integrations.optax.save", "cplus.integrations.optax.restore",
        "cplus.integrations.optax.collaborative", "cplus.integrations.optax.blend",
    ),
    "Algorithm 1": (
        "cplus.core.algorithm.blend", "cplus.core.algorithm.collaborates", "cplus.core.algorithm.smooth",
        "cplus.core.algorithm.coefficient", "cplus.core.algorithm.apply", "cplus.core.algorithm.run",
    ),
}  # fmt: skip
"""What the page of the Python API shows, by section."""

RECORDS = {
    "A job's receipt, in `record.json`": (
        "cplus.receipts.contents.Receipt", "cplus.receipts.contents.RowSet", "cplus.receipts.contents.RowComparison",
        "cplus.receipts.contents.Point",
    ),
    "A study's run: a line of `results/<scale>/<study>.jsonl`": ("cplus.lab.records.RunResult",),
    "A study's sequence of tasks": ("cplus.lab.records.SequenceResult",),
    "A bank of self-probes": ("cplus.probes.bank.Bank",),
}  # fmt: skip


def commands() -> str:
    """Every command with its arguments and options."""
    import typer

    from cplus.cli.app import app

    lines = [
        "# Commands",
        "",
        "Made from the command line itself; `cplus COMMAND --help` prints the same. Every command that reports figures",
        "takes `--json`: one object on standard output, everything else on standard error. Exit code 0 is success, 1",
        "an error in one sentence, 2 a requirement that was not met or an option that does not exist, 130 and 143 a",
        "job that was stopped.",
        "",
    ]
    for name, command in _walk(typer.main.get_command(app), "cplus"):
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
        usage = " ".join([name, *(_argument(p) for p in arguments), "[OPTIONS]"])
        lines += [f"## `{name}`", "", _text(command.help), "", "```text", usage, "```", ""]
        rows = [*((f"`{_argument(p)}`", p) for p in arguments), *((_names(p), p) for p in options)]
        lines += ["| option | value | default | |", "|---|---|---|---|"]
        lines += [f"| {shown} | {_value(p)} | {_default(p)} | {_text(getattr(p, 'help', ''))} |" for shown, p in rows]
        lines += [""]
    return "\n".join(lines)


def settings() -> str:
    """Every setting of `cplus adapt`, from its schema."""
    from cplus.jobs.settings import GROUPS, OWN, SHARED, AdaptConfig, RepairConfig

    properties = AdaptConfig.model_json_schema()["properties"]
    lines = [
        "# Settings",
        "",
        "The settings of `cplus adapt`, made from their schema. One name everywhere: `batch_size` in YAML and in",
        "`cplus.AdaptConfig`, `--set batch_size=8` on the command line; the most used ones have an option there too,",
        "`--batch-size 8` (`validation` is `--validate`). An unknown name or a wrong value is refused in one sentence.",
        "`examples/adapt.yaml` is a file with every setting, `cplus adapt --schema` prints the JSON Schema.",
        "",
    ]
    for group, names in {"The model": ("model",), **GROUPS}.items():
        lines += [f"## {group}", "", *_settings_table(properties, names)]
    own = RepairConfig.model_json_schema()["properties"]
    lines += [
        "## A repair's own",
        "",
        "`cplus repair` (`cplus.RepairConfig`) has these, and shares with `cplus adapt`:",
    ]
    lines += [", ".join(f"`{name}`" for name in SHARED) + ".", "", *_settings_table(own, OWN)]
    return "\n".join(lines)


def api() -> str:
    """The Python API, from the docstrings."""
    names = "`, `".join(f"cplus.{name}" for name in _public())
    head = [
        "# Python API",
        "",
        f"Public names of the package itself: `{names}`. Below each is shown where it is defined. The settings",
        "`AdaptConfig` and `RepairConfig` are in [Settings](settings.md), the rows of `METHODS` in",
        "[Methods](../methods.md).",
        "",
    ]
    return "\n".join([*head, *_sections(API)])


def records() -> str:
    """The files that jobs and studies write."""
    head = (Path(__file__).parent / "records_head.md").read_text(encoding="utf-8")
    return "\n".join([head, *_sections(RECORDS)])


PAGES = {
    "reference/commands.md": commands,
    "reference/settings.md": settings,
    "reference/api.md": api,
    "reference/records.md": records,
}
"""The generated pages."""


def _public() -> list[str]:
    import cplus

    return list(cplus.__all__)


def _sections(table: dict[str, tuple[str, ...]]) -> Iterator[str]:
    for title, names in table.items():
        yield f"## {title}\n"
        yield from (f"::: {name}\n" for name in names)


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for inner in command.commands.values():
            yield from _walk(inner, f"{name} {inner.name}")
    else:
        yield name, command


def _argument(parameter: Any) -> str:
    shown = (parameter.metavar or parameter.name or "").upper().strip("[]")
    return shown if parameter.required else f"[{shown}]"


def _names(parameter: Any) -> str:
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _value(parameter: Any) -> str:
    """What an option takes; arguments and flags take nothing by name."""
    if getattr(parameter, "is_flag", False) or parameter.param_type_name == "argument":
        return ""
    if parameter.metavar:
        return parameter.metavar.lower().replace("|", "\\|")
    if (kind := getattr(parameter, "type_descriptor", None)) is None:  # typer before 0.29 has click's types
        return str(parameter.type.name)
    return _annotated(kind.annotation)


def _annotated(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) in (list, tuple):
        return f"{_annotated(get_args(annotation)[0])}, repeatable"
    return {"int": "whole number", "float": "number", "str": "text", "Path": "path"}.get(annotation.__name__, "value")


def _default(parameter: Any) -> str:
    value = parameter.default
    if (
        parameter.required
        or value is None
        or value is False
        or value == ()
        or callable(value)
        or "UNSET" in repr(value)
    ):
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _settings_table(properties: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    rows = ["| setting | value | default | |", "|---|---|---|---|"]
    for name in names:
        field = properties[name]
        default = field.get("default")
        shown = (
            "" if default in (None, [], ()) else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        )
        rows.append(f"| `{name}` | {_kind(field)} | {shown} | {_text(field.get('description'))} |")
    return [*rows, ""]


def _kind(field: dict[str, Any]) -> str:
    """A field's type and bounds in words, from its JSON Schema."""
    if "anyOf" in field:
        kinds = [_kind(one) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        return "list" if not field.get("items") else f"list of {_kind(field['items'])}"
    if "$ref" in field:
        return "`" + field["$ref"].rsplit("/", 1)[-1].lower() + "`"
    words = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "yes or no",
        "object": "mapping",
    }
    bounds = {"minimum": ">= {}", "exclusiveMinimum": "> {}", "maximum": "<= {}", "exclusiveMaximum": "< {}"}
    limits = [text.format(f"{field[key]:g}") for key, text in bounds.items() if key in field]
    return " ".join([words.get(field.get("type", ""), "value"), ", ".join(limits)]).strip()


def _text(value: str | None) -> str:
    """A sentence for a table's cell: on one line, with nothing that Markdown would read as its own."""
    escaped = " ".join((value or "").split()).replace("\\", "\\\\")
    for mark in ("|", "<", "*", "_", "["):
        escaped = escaped.replace(mark, f"\\{mark}")
    return escaped
