"""Rows to begin with, as files: facts that the built-in model does not know, and facts that it should keep.

python -m cplus.toy.rows [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from cplus.base import files
from cplus.data.examples import lines
from cplus.toy.world import taught, untaught

NEW, KEEP, PAST = 32, 8, 128


def write(folder: Path) -> list[Path]:
    """Write `new.jsonl` (to learn), `keep.jsonl` (the anchors) and `past.jsonl` (only to measure on)."""
    known = taught("harbours")
    rows = {"new": untaught("harbours")[:NEW], "keep": known[:KEEP], "past": known[KEEP : KEEP + PAST]}
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, facts in rows.items():
        path = folder / f"{name}.jsonl"
        text = lines(facts)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise FileExistsError(f"{path} holds other rows; give an empty folder: python -m cplus.toy.rows FOLDER")
        files.write_text(path, text)
        written.append(path)
    return written


def main() -> None:
    """Write the files and name them."""
    if len(sys.argv) > 2:
        sys.exit(f"expected at most one folder, got {len(sys.argv) - 1} arguments: python -m cplus.toy.rows [FOLDER]")
    try:
        written = write(Path(*sys.argv[1:]))
    except OSError as error:
        sys.exit(str(error))
    print("wrote", ", ".join(map(str, written)))


if __name__ == "__main__":
    main()
