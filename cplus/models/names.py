"""Names of models, checked without loading torch."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import yaml

from cplus import toy
from cplus.models.packages import PACKAGED
from cplus.models.presets import PRESETS

ALIASES = (*toy.NAMES, *PACKAGED, *PRESETS)


def check(name: str) -> None:
    """Refuse a file or folder that is not there and a misspelt alias; a hub id is not looked up."""
    path = Path(name).expanduser()
    if name in ALIASES:
        return
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"{name}: there is no such GGUF file")
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{name}: expected a model folder, but it holds no config.json")
    elif name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise ValueError(f"{name}: there is no such model folder")
    elif "/" not in name and (near := difflib.get_close_matches(name.lower(), ALIASES, n=3)):
        raise ValueError(f"unknown model {name!r}; did you mean {' or '.join(near)}? Else give owner/name, or a folder")


HUB_IDS = {
    **{alias: model.hub_id for alias, model in PACKAGED.items()},
    **{alias: preset.model for alias, preset in PRESETS.items()},
}


def origin(name: str) -> tuple[str, str | None]:
    """The hub id of a model, as far as it is known, and the licence its model card states; offline.

    >>> origin("smollm2-135m"), origin("owner/name")
    (('HuggingFaceTB/SmolLM2-135M-Instruct', 'apache-2.0'), ('owner/name', None))
    """
    if name in PACKAGED:
        return PACKAGED[name].hub_id, PACKAGED[name].licence
    card = Path(name).expanduser() / "README.md"
    front = _front_matter(card.read_text(encoding="utf-8")) if card.is_file() else {}
    base = front.get("base_model")
    found = base if isinstance(base, str) else HUB_IDS.get(name, name)
    licence = front.get("license")
    return found, licence if isinstance(licence, str) else None


def _front_matter(text: str) -> dict[str, object]:
    """The YAML between the first two lines of dashes; empty where there is none that reads."""
    parts = text.split("---\n")
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        found = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
