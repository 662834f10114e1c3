"""Write cplus/data/paper_sets.json from a folder that holds the four sets: `python tools/paper_sets.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cplus.data.examples import Choice, fingerprint
from cplus.data.readers import read_file
from cplus.data.tasks import PAPER
from cplus.lab import paper_sets


def main(folder: Path) -> None:
    """Hash every row of the four sets."""
    found = {}
    for name in PAPER:
        rows = read_file(folder / f"{name}.jsonl")
        words = [paper_sets.key_of(row).packed() for row in rows if isinstance(row, Choice)]
        found[name] = {"sha256": fingerprint(rows), "rows": " ".join(words)}
        print(f"{name}: {len(words):,} rows, {found[name]['sha256']}")
    path = Path(paper_sets.__file__).with_suffix(".json")
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
