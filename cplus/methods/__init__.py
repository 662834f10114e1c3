"""Methods: the table, and what its rows are made of."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`cplus.methods.METHODS` and the other names of the table, imported on first use."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("cplus.methods.table"), name)
