"""The built-in toy world and the language models trained on it: `toy-s`, `toy` and `toy-l`."""

from __future__ import annotations

from pathlib import Path

NAMES = ("toy-s", "toy", "toy-l")


def folder(name: str) -> Path:
    """The folder of a model shipped with the package, ready for `from_pretrained`."""
    if name not in NAMES:
        raise ValueError(f"expected a toy model ({', '.join(NAMES)}), got {name!r}")
    return Path(__file__).parent / "weights" / name
