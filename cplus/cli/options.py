"""What verbs share: options and `--set` made from the schema, and names checked before torch is imported."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from cplus.data.prompts import read_template
from cplus.data.readers import ENDINGS, PREFIX, weighted
from cplus.data.tasks import TASKS, load_task
from cplus.distributed import processes
from cplus.jobs.settings import CHOSEN, GROUPS, OTHER_NAMES, AdaptConfig, unknown
from cplus.methods.table import METHODS, method
from cplus.models.names import ALIASES
from cplus.models.names import check_name as check_model
from cplus.toy.world import DOMAINS

# Names of models, methods, tasks and templates: completed by the shell, and refused before torch is imported.


_TASKS = ("new", "anchors", "past", "split", "external", "task")


def _completing(names: Iterable[str]) -> Callable[[str], list[str]]:
    """What completes to one of these names; the shell itself completes files."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


KNOWN_TASKS = (*TASKS, *DOMAINS)
methods, models, tasks = map(_completing, (METHODS, ALIASES, KNOWN_TASKS))
COMPLETIONS = {"model": models, "method": methods, **dict.fromkeys(_TASKS, tasks)}
"""What completes a setting's value, by the setting's name."""


def check(values: Mapping[str, Any]) -> None:
    """Refuse a misspelt model, method or task and a broken template; importing torch first would take seconds."""
    if isinstance(name := values.get("model"), str):
        check_model(name)
    if isinstance(name := values.get("method"), str) and not name.startswith("python:"):
        method(name)
    for setting in _TASKS:
        found = values.get(setting) or ()
        for name in (found,) if isinstance(found, str) else found:
            task = weighted(str(name))[0] if setting == "new" else str(name)
            path = Path(task).expanduser()
            local = "/" not in task or task.startswith((".", "~", "/")) or path.suffix in ENDINGS
            if local and not path.exists() and task not in KNOWN_TASKS and not task.startswith(PREFIX):
                load_task(task)  # what is neither known nor there is refused; a hub id is not looked up
    if (place := values.get("chat_template")) is not None:
        read_template(Path(place))


# Options that commands share, made from the schema of the settings.


Verb = TypeVar("Verb", bound=Callable[..., None])

PANELS = {name: group for group, names in GROUPS.items() for name in names}
FLAGS = {"validation": "--validate"}
"""Options that are not called as their setting."""
EVALUATION = ("interface", "judge", "max_new_tokens", "plain", "too_long", "data_dir", "device", "compute_dtype")
"""The settings that decide how a model is evaluated."""

Config = Annotated[Path | None, typer.Option(help="YAML file of settings; command-line options override the file.")]
Device = Annotated[str, typer.Option(help=AdaptConfig.model_fields["device"].description)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Model = Annotated[str, typer.Argument(help="Alias, hub id, folder or GGUF file.", autocompletion=models)]
OptionalModel = Annotated[str | None, typer.Argument(help="Alias, hub id, folder or GGUF file.", autocompletion=models)]
Require = Annotated[
    list[str] | None, typer.Option(help="Such as past-loss<=+0.05: exit code 2 if its 95 % bound misses it.")
]


def with_settings(
    shown: Sequence[str], names: Iterable[str] = (), schema: type[AdaptConfig] = AdaptConfig
) -> Callable[[Verb], Verb]:
    """Give a command an option for each setting that is shown, and `--set` for these and `names`.

    They arrive in its keyword arguments, to be read by `given`.
    """
    settable = [*shown, *(name for name in names if name not in shown)]

    def completed(incomplete: str) -> list[str]:
        name, mark, begun = incomplete.partition("=")
        if not mark:
            return [f"{each}=" for each in settable if each.startswith(name)]
        return [f"{name}={value}" for value in _values(name, schema, begun)]

    def extended(verb: Verb) -> Verb:
        own = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        text = "Any other setting; repeatable. 'cplus adapt --schema' describes them, TAB completes them."
        option = typer.Option("--set", metavar="NAME=VALUE", help=text, autocompletion=completed)
        added = [_parameter(name, schema) for name in shown]
        added.append(_keyword("assigned", Annotated[list[str] | None, option]))
        verb.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        verb.settable = settable  # type: ignore[attr-defined]
        return verb

    return extended


def given(options: Mapping[str, Any], names: Iterable[str] = AdaptConfig.model_fields, **more: Any) -> dict[str, Any]:
    """The settings that were given on the command line, by options of their own or by `--set`."""
    values = {name: value for name, value in {**options, **more}.items() if value is not None and value != []}
    for text in values.pop("assigned", ()):
        name, mark, value = text.partition("=")
        if not mark:
            raise ValueError(f"expected NAME=VALUE, as in --set order=file, got --set {text}")
        if name not in names:
            raise ValueError(unknown(name, list(names)))
        field = AdaptConfig.model_fields.get(name)
        if field is not None and _plain(field.annotation) == list[str]:
            values[name] = [*values.get(name, []), value]
        elif name in values:
            raise ValueError(f"expected one value of {name}, got {values[name]} and {value}")
        else:
            switch = field is not None and field.annotation is bool
            values[name] = {"true": True, "false": False}.get(value, value) if switch else value
    return values


def _keyword(name: str, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _parameter(name: str, schema: type[AdaptConfig]) -> inspect.Parameter:
    field = schema.model_fields[name]
    hidden = field.default in (None, ()) or field.default is False or name in CHOSEN
    text = str(field.description) + ("" if hidden else f" [dim]\\[default: {field.default}][/dim]")
    option = typer.Option(
        *((FLAGS[name],) if name in FLAGS else ()),
        help=text,
        autocompletion=COMPLETIONS.get(name),
        rich_help_panel=PANELS.get(name),
        show_default=False,
    )
    return _keyword(name, Annotated[_plain(field.annotation) | None, option])


def _plain(annotation: Any) -> Any:
    """The type as the command line reads it; lists repeat, and the schema reads richer types from text."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        return list[str]
    if origin is Literal or annotation in (str, int, float, bool, Path):
        return annotation
    if origin is Annotated:
        return _plain(inner[0])
    found = [_plain(kind) for kind in inner if kind is not type(None)]
    if list[str] in found or str in found:
        return list[str] if list[str] in found else str
    return found[0] if found else str


def _values(name: str, schema: type[AdaptConfig], begun: str) -> list[str]:
    """Values of a setting that begin like this, where it has a list of them."""
    if name in COMPLETIONS:
        return COMPLETIONS[name](begun)
    kind = _plain(schema.model_fields[name].annotation) if name in schema.model_fields else None
    known = ("true", "false") if kind is bool else get_args(kind) if get_origin(kind) is Literal else ()
    return [value for value in known if value.startswith(begun)]


# Commands that answer an old name, and the option names of other trainers, with ours.


_TOGETHER = ("adapt",)
"""Commands that several processes can run together."""
_OTHER_OPTIONS = {"model": "model", "resume_from_checkpoint": "resume", "overwrite_output_dir": "force"}
"""Options of other trainers that are no settings here."""
_GONE = {
    "run --executor": "--slurm NAME=VALUE submits to Slurm by itself",
    "run --threads": "every process uses one thread; --workers sets their number",
    "write --verify": "use cplus probe audit BANK",
    "write --rows": "leave it out, it changed no bank",
    "write --limit": "give --task a file with the rows to draw from",
    "audit --data-dir": "set CPLUS_DATA to the folder",
    "check --answer-tokens": "leave it out, an answer ends after 48 tokens",
    "export --force": "remove the file first, or choose another --out",
}
"""Options of earlier versions, with what to do instead."""


class Command(TyperCommand):
    """A command that knows misspelt options, those of other trainers and those of its own past."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; only one of them can use several processes."""
        if (count := processes.started()[1]) > 1 and self.name not in _TOGETHER:
            name = ctx.command_path.removeprefix(ctx.find_root().command_path)
            raise ValueError(
                f"expected one process, got {count}: cplus{name} runs in one alone; start it without torchrun"
            )
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Answer an option that is known under another name."""
        known = {"--help", *(option for one in self.params for option in (*one.opts, *one.secondary_opts))}
        settable = getattr(self.callback, "settable", ())
        spelt = {f"--{name.replace('_', '-')}": f"--set {name}=VALUE" for name in settable}
        spelt |= {option: option for option in known if option.startswith("--")}
        for place, word in enumerate(args):
            option, mark, value = word.partition("=")
            if not option.startswith("--") or option in known:
                continue
            if instead := _GONE.get(f"{self.name} {option}"):
                raise typer.BadParameter(f"there is no option {option} any more; {instead}")
            asked = option[2:].replace("-", "_")
            name = {**OTHER_NAMES, **_OTHER_OPTIONS}.get(asked, asked)
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            if flag in known:
                raise typer.BadParameter(f"there is no option {option}; did you mean {flag}?")
            if name in known:
                raise typer.BadParameter(f"there is no option {option}; give the {name} as an argument, without a name")
            off = name.removeprefix("no_")
            if name in settable or off in settable:
                field = AdaptConfig.model_fields.get(off)
                if field is not None and field.annotation is bool:
                    name, value = off, str(off == name).lower()
                elif name != asked:  # the other trainer's value may mean something else
                    value = "VALUE"
                elif not mark:
                    value = "".join(args[place + 1 : place + 2]) or "VALUE"
                raise typer.BadParameter(f"{option} is set by: --set {name}={value}")
            if near := difflib.get_close_matches(option, spelt, n=1):
                raise typer.BadParameter(f"there is no option {option}; did you mean {spelt[near[0]]}?")
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    """Commands under one word; `moved` answers the name of a command that is elsewhere now."""

    moved: ClassVar[Mapping[str, str]] = {}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command by its name."""
        if args[0] not in self.commands and args[0] in self.moved:
            raise typer.BadParameter(f"there is no command {args[0]} any more; use {self.moved[args[0]]}")
        return super().resolve_command(ctx, args)
