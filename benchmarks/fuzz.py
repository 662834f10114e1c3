"""The long search for inputs that break a reader: `PYTHONPATH=tests python benchmarks/fuzz.py --out fuzz.json`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fuzzing import Target, fuzz, quiet, targets

from cplus import models
from cplus.base import files
from cplus.base.environment import environment


def searched(target: Target, inputs: int, seed: int) -> dict[str, Any]:
    """One reader's row: what came of the inputs, or the smallest one that crashed it."""
    begun = time.perf_counter()
    try:
        found = fuzz(target, inputs, first_seed=seed)
    except (Exception, ExceptionGroup) as error:  # a crash is the finding, whatever it is
        notes = " ".join(getattr(error, "__notes__", ()))
        found = {"crash": f"{type(error).__name__}: {error}"[:500], "input": notes[:500]}
    return {"target": target.name, **found, "seconds": round(time.perf_counter() - begun, 1)}


def main() -> int:
    """Search every reader, print one line each, and write the summary."""
    options = argparse.ArgumentParser(description="Fuzz every reader.")
    options.add_argument("--inputs", type=int, default=100_000, help="for each reader")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", nargs="*", help="names of readers")
    options.add_argument("--out", type=Path, help="the summary as JSON")
    asked = options.parse_args()
    rows = []
    # Every input is a small file over the one before: a disk would be waited for at each of them.
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="cplus-fuzz-", dir=place) as folder, quiet():
        for target in targets(Path(folder), models.load("toy", device="cpu").tokenizer):
            if asked.only and target.name not in asked.only:
                continue
            rows.append(searched(target, asked.inputs, asked.seed))
            print(json.dumps(rows[-1]), flush=True)
    summary = {"readers": rows, "seed": asked.seed, "environment": environment(threads=1, device="cpu")}
    if asked.out is not None:
        files.write_json(asked.out, summary)
    return 1 if any("crash" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
