"""Options that verbs share, made from the schema, and names completed and checked before torch is imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from cplus.jobs.settings import CHOSEN, GROUPS, AdaptConfig

# Names of models, methods, tasks and templates: completed by the shell, and refused before torch is imported.


_TASKS = ("new", "anchors", "past", "split", "external", "task")


def methods(incomplete: str) -> list[str]:
    """Methods that begin like this."""
    from cplus.methods.table import METHODS

    return _beginning(METHODS, incomplete)


def tasks(incomplete: str) -> list[str]:
    """Named tasks that begin like this; the shell itself completes files."""
    from cplus.data.tasks import TASKS
    from cplus.toy.world import DOMAINS

    return _beginning((*TASKS, *DOMAINS), incomplete)


def models(incomplete: str) -> list[str]:
    """Aliases of models that begin like this."""
    from cplus.models.names import ALIASES

    return _beginning(ALIASES, incomplete)


COMPLETIONS = {"model": models, "method": methods, **dict.fromkeys(_TASKS, tasks)}
"""What completes a setting's value, by the setting's name."""


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def check(values: Mapping[str, Any]) -> None:
    """Refuse a misspelt model, method or task and a broken template; importing torch first would take seconds."""
    from cplus.data.prompts import read_template
    from cplus.data.readers import weighted
    from cplus.methods.table import method
    from cplus.models.names import check_name as check_model

    if isinstance(name := values.get("model"), str):
        check_model(name)
    if isinstance(name := values.get("method"), str) and not name.startswith("python:"):
        method(name)
    for setting in _TASKS:
        found = values.get(setting) or ()
        for name in (found,) if isinstance(found, str) else found:
            _check_task(weighted(str(name))[0] if setting == "new" else str(name))
    if (place := values.get("chat_template")) is not None:
        read_template(Path(place))


def _check_task(name: str) -> None:
    """Let the loader refuse what is neither known nor there; a hub id is not looked up."""
    from cplus.data.readers import ENDINGS, PREFIX
    from cplus.data.tasks import load_task

    path = Path(name).expanduser()
    local = "/" not in name or name.startswith((".", "~", "/")) or path.suffix in ENDINGS
    if local and not path.exists() and name not in tasks("") and not name.startswith(PREFIX):
        load_task(name)


def check_tuned(name: str) -> None:
    """Refuse a fine-tuned model that is not there; a folder may hold adapters instead of a model."""
    from cplus.models.names import check_name as check_model

    path = Path(name).expanduser()
    if (path / "adapter_config.json").is_file():
        return
    if (path / "model" / "config.json").is_file() and not (path / "config.json").is_file():
        raise ValueError(f"{name}: expected a model, got the folder of a job; did you mean {path / 'model'}?")
    check_model(name)


# Options that commands share, made from the schema of the settings.


Command = TypeVar("Command", bound=Callable[..., None])

SETTINGS = {name: group for group, names in GROUPS.items() for name in names}
"""Every setting besides the model, with the group it is shown in."""
FLAGS = {"validation": "--validate"}
"""Options that are not called as their setting."""


def setting(name: str, schema: type[AdaptConfig] = AdaptConfig, **shown: Any) -> Any:
    """An option described, and completed by the shell, as the setting of this name."""
    shown = {"help": schema.model_fields[name].description, **shown}
    flags = (FLAGS[name],) if name in FLAGS else ()
    return typer.Option(*flags, autocompletion=COMPLETIONS.get(name), **shown)


ComputeDtype = Annotated[str, setting("compute_dtype", help="Precision of the computation: float32 or bfloat16.")]
Config = Annotated[Path | None, typer.Option(help="YAML file of settings; command-line options override the file.")]
DataDir = Annotated[Path | None, setting("data_dir")]
Device = Annotated[str, setting("device")]
InterfaceName = Annotated[Literal["letter", "cloze", "freeform"] | None, setting("interface")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Judge = Annotated[str, setting("judge")]
MaxNewTokens = Annotated[int, setting("max_new_tokens", min=1)]
Model = Annotated[str, typer.Argument(help="Alias, hub id, folder or GGUF file.", autocompletion=COMPLETIONS["model"])]
OptionalModel = Annotated[
    str | None, typer.Argument(help="Alias, hub id, folder or GGUF file.", autocompletion=COMPLETIONS["model"])
]
Plain = Annotated[bool, typer.Option("--plain", help=AdaptConfig.model_fields["plain"].description)]
TooLong = Annotated[
    Literal["refuse", "exclude"],
    setting("too_long", help="What to do with rows longer than the model's context window."),
]


def with_settings(names: Iterable[str]) -> Callable[[Command], Command]:
    """Give a command one option for each of these settings; they arrive in its keyword arguments, None if not given."""

    chosen = set(names)

    def extended(command: Command) -> Command:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = [_parameter(name) for name in SETTINGS if name in chosen]
        command.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        return command

    return extended


def given(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The settings that were given on the command line."""
    return {name: value for name, value in {**options, **more}.items() if value is not None and value != []}


def _parameter(name: str) -> inspect.Parameter:
    field = AdaptConfig.model_fields[name]
    hidden = field.default in (None, ()) or field.default is False or name in CHOSEN
    text = str(field.description) + ("" if hidden else f" [dim]\\[default: {field.default}][/dim]")
    option = setting(name, help=text, rich_help_panel=SETTINGS[name], show_default=False)
    kind: Any = Annotated[_plain(field.annotation) | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


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
