"""Names of models, checked without loading torch."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from cplus import toy
from cplus.models.presets import PRESETS

ALIASES = (*toy.NAMES, "smollm2-135m", *PRESETS)


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
