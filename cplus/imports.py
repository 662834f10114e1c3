"""User modules named on the command line or in settings."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def user_module(name: str) -> ModuleType:
    """Import a module by its name; the current folder is searched too, as with `python -m`.

    >>> user_module("json").__name__
    'json'
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)
