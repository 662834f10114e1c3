"""Rows to begin with, as files: facts that the built-in model does not know, and facts that it should keep.

python -m cplus.toy.rows [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cplus.base import files
from cplus.data.examples import lines
from cplus.toy.world import taught, untaught

NEW, KEEP, PAST = 32, 8, 128


def write(folder: Annotated[Path, typer.Argument()] = Path()) -> None:
    """Write `new.jsonl` (to learn), `keep.jsonl` (the anchors) and `past.jsonl` (only to measure on)."""
    known = taught("harbours")
    rows = {"new": untaught("harbours")[:NEW], "keep": known[:KEEP], "past": known[KEEP : KEEP + PAST]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, facts in rows.items():
        path = folder / f"{name}.jsonl"
        text = lines(facts)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} holds other rows; give an empty folder: python -m cplus.toy.rows FOLDER")
        files.write_text(path, text)
        print("wrote", path)


def main() -> None:
    """The command line."""
    typer.run(write)


if __name__ == "__main__":
    main()
