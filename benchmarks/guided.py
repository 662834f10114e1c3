"""Inputs that grow by what they reach: atheris over the readers of text, one process a reader.

pip install 'cplus[fuzz]' && PYTHONPATH=tests python benchmarks/guided.py --out benchmarks/results/guided.json

The inputs and what must hold of them are those of `make fuzz`; atheris mutates the bytes behind them and keeps what
reaches a new line of cplus.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

READERS = (
    "rows.jsonl",
    "rows.json",
    "rows.csv",
    "parse.letter",
    "parse.cloze",
    "parse.freeform",
    "judge.json",
    "config",
)


def search(name: str, inputs: int, seed: int, place: Path) -> None:
    """Feed one reader until so many inputs were read or one crashed it; prints the row and ends the process."""
    import atheris

    with atheris.instrument_imports(include=["cplus"]):
        from fuzzing import quiet, targets
        from hypothesis import HealthCheck, given, settings

        from cplus import models
    outcomes: Counter[str] = Counter()
    begun = time.perf_counter()

    def end(**found: Any) -> None:
        row = {"target": name, "inputs": sum(outcomes.values()), "outcomes": dict(sorted(outcomes.items())), **found}
        print(json.dumps({**row, "seconds": round(time.perf_counter() - begun, 1)}), flush=True)
        os._exit(1 if found else 0)

    corpus, folder = place / "corpus", place / "work"
    corpus.mkdir()
    folder.mkdir()
    with quiet():
        known = {target.name: target for target in targets(folder, models.load("toy", device="cpu").tokenizer)}

        @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(known[name].inputs)
        def one(value: Any) -> None:
            try:
                outcomes[known[name].check(value)] += 1
            except Exception as error:  # a crash is the finding, whatever it is
                end(crash=f"{type(error).__name__}: {error}"[:500], input=repr(value)[:500])
            if sum(outcomes.values()) >= inputs:
                end()

        options = [sys.argv[0], f"-seed={seed + 1}", "-verbosity=0", "-len_control=0", "-max_len=4096", str(corpus)]
        atheris.Setup(options, one.hypothesis.fuzz_one_input)
        atheris.Fuzz()


def main() -> int:
    """Search every reader in a process of its own, which is how atheris works, and write the summary."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--inputs", type=int, default=25_000, help="for each reader")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", nargs="*", default=READERS, help="names of readers")
    options.add_argument("--out", type=Path, help="the summary as JSON")
    options.add_argument("--reader", help=argparse.SUPPRESS)
    options.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.reader:
        search(asked.reader, asked.inputs, asked.seed, asked.place)
    rows = [_apart(name, asked.inputs, asked.seed) for name in asked.only]
    if asked.out is not None:
        from cplus.base import files
        from cplus.base.environment import environment

        files.write_json(
            asked.out, {"readers": rows, "seed": asked.seed, "environment": environment(threads=1, device="cpu")}
        )
    return 1 if any("crash" in row for row in rows) else 0


def _apart(name: str, inputs: int, seed: int) -> dict[str, Any]:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(
        prefix="cplus-guided-", dir=memory
    ) as place:  # the process ends without clearing up
        line = [sys.executable, __file__, "--reader", name, "--place", place]
        line += ["--inputs", str(inputs), "--seed", str(seed)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"{name}: the search ended with {done.returncode}: {done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
