"""Files against their bar of branch coverage: `coverage json -q -o - | python benchmarks/coverage_bars.py FILE ...`.

The bar holds for each file alone, and for its branches apart from its lines: a sum would let straight code make up for
an error message that no test has seen. Exit code 1 where a file is under the bar or was not measured at all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

ROW = "{:<28} {:>9} {:>9} {:>7}  {}"


def share(covered: int, count: int) -> float:
    """Percent; a file without branches has missed none.

    >>> share(3, 4), share(0, 0)
    (75.0, 100.0)
    """
    return 100.0 * covered / count if count else 100.0


def missed(found: Mapping[str, Any]) -> str:
    """The branches that no test took, and the lines that none reached: `81->82 90->exit, lines 12 13`."""
    branches = [f"{start}->{end if end > 0 else 'exit'}" for start, end in found["missing_branches"]]
    lines = [f"lines {' '.join(map(str, found['missing_lines']))}"] if found["missing_lines"] else []
    return ", ".join([*([" ".join(branches)] if branches else []), *lines])


def read(text: str) -> dict[str, Any]:
    """What coverage measured, by file; without data it writes a sentence in place of JSON."""
    try:
        return dict(json.loads(text)["files"])
    except ValueError as error:
        raise SystemExit(f"expected what 'coverage json -o -' writes, got {text.strip()[:80]!r}") from error


def main() -> int:
    """Print one line a file, and say which are under the bar."""
    options = argparse.ArgumentParser(description="Hold files against a bar of branch coverage.")
    options.add_argument("files", nargs="+")
    options.add_argument("--bar", type=float, default=95.0, help="percent of the branches, and of the lines")
    asked = options.parse_args()
    measured = read(sys.stdin.read())
    print(ROW.format("file", "branches", "percent", "lines", "missed"))
    under = []
    for name in asked.files:
        if name not in measured:
            print(ROW.format(name, "-", "-", "-", "not measured: there is no such file"))
            under.append(name)
            continue
        counts = measured[name]["summary"]
        lines = share(counts["covered_lines"], counts["num_statements"])
        taken, total = counts["covered_branches"], counts["num_branches"]
        branches = share(taken, total)
        print(ROW.format(name, f"{taken}/{total}", f"{branches:.1f}", f"{lines:.1f}", missed(measured[name])))
        if min(branches, lines) < asked.bar:
            under.append(name)
    if under:
        print(f"under {asked.bar:g} %: {', '.join(under)}", file=sys.stderr)
    return 1 if under else 0


if __name__ == "__main__":
    sys.exit(main())
