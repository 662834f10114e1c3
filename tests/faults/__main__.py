"""`python -m faults [--times 6] [--seed 0] [--json FILE]`: the matrix as a table; exit code 1 where a field is red."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path

# Before torch is imported: nothing that a fork would break.
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def main() -> int:
    """Run and print the matrix."""
    from cplus.base.files import write_json
    from faults.commands import COMMANDS
    from faults.matrix import FAULTS, matrix

    options = argparse.ArgumentParser(description="Every command that writes, under every fault.")
    options.add_argument("--times", type=int, default=6, help="how often each fault comes")
    options.add_argument("--seed", type=int, default=0, help="of the moments")
    options.add_argument("--json", type=Path, help="write the fields to this file")
    options.add_argument("--only", nargs="*", help="names of commands")
    options.add_argument("--faults", nargs="*", help="names of faults")
    asked, begun, cells = options.parse_args(), time.monotonic(), []
    faults = tuple(fault for fault in FAULTS if not asked.faults or fault.name in asked.faults)
    chosen = tuple(command for command in COMMANDS if not asked.only or command.name in asked.only)
    print(f"{'command':<9}{'fault':<18}{'survived':<10}{'nothing lost':<14}{'bitwise':<9}{'faults':<8}seconds")
    with tempfile.TemporaryDirectory(prefix="cplus-faults-") as place:
        for cell in matrix(chosen, faults, Path(place), seed=asked.seed, times=asked.times):
            cells.append(cell)
            words = ["yes" if good else "NO" for good in (not cell.problems, not cell.lost, cell.bitwise)]
            hit = sum(code != 0 for code in cell.ends)
            print(
                f"{cell.command:<9}{cell.fault:<18}{words[0]:<10}{words[1]:<14}{words[2]:<9}{hit:<8}{cell.seconds:.1f}"
            )
            for problem in cell.problems:
                print(f"    {problem}")
    good = all(cell.good for cell in cells)
    print(f"{sum(cell.good for cell in cells)} of {len(cells)} fields green in {time.monotonic() - begun:.0f} s")
    if asked.json is not None:
        write_json(asked.json, {"good": good, "cells": [{**dataclasses.asdict(c), "good": c.good} for c in cells]})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
