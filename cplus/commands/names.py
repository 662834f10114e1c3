"""Names of models, methods, tasks and templates: completed by the shell, and refused before torch is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_TASKS = ("new", "anchors", "past", "split", "external", "task")


def methods(incomplete: str) -> list[str]:
    """Methods that begin like this."""
    from cplus.methods import METHODS

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
    from cplus.data.readers import weighted
    from cplus.interfaces.template import read_template
    from cplus.models.names import check as check_model
    from cplus.selection import method

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
    from cplus.data.harness import PREFIX
    from cplus.data.readers import ENDINGS
    from cplus.data.tasks import load_task

    path = Path(name).expanduser()
    local = "/" not in name or name.startswith((".", "~", "/")) or path.suffix in ENDINGS
    if local and not path.exists() and name not in tasks("") and not name.startswith(PREFIX):
        load_task(name)


def check_tuned(name: str) -> None:
    """Refuse a fine-tuned model that is not there; a folder may hold adapters instead of a model."""
    from cplus.models.names import check as check_model

    path = Path(name).expanduser()
    if (path / "adapter_config.json").is_file():
        return
    if (path / "model" / "config.json").is_file() and not (path / "config.json").is_file():
        raise ValueError(f"{name}: expected a model, got the folder of a job; did you mean {path / 'model'}?")
    check_model(name)
