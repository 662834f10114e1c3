"""Loading models by name, identifying them by fingerprint, and saving them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cplus.models.names import ALIASES, PRESETS

if TYPE_CHECKING:
    from cplus.models.loading import Loaded, choose_device, computing, fingerprint, load, of, resolve, save
    from cplus.models.loading import window as window

__all__ = [
    "ALIASES", "PRESETS", "Loaded", "choose_device", "computing", "fingerprint", "load", "of",
    "resolve", "save", "window",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What needs torch is imported on first use, so that a misspelt name is refused at once."""
    if name not in __all__:
        raise AttributeError(f"module 'cplus.models' has no attribute {name!r}")
    return getattr(import_module("cplus.models.loading"), name)
