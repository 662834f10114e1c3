"""What a user waits for: `python benchmarks/first_update.py [--rows 60 600] [--runs 3]`.

Each run plans a job and does it, as a user would, in new processes with an empty cache of banks:
`cplus adapt smollm2-135m --new rows.jsonl --out out`. Measured are the seconds from the command to the first update
(at most 60, with the model on disk), those of `--plan` (at most 20, and right within a factor of 1.5), those of
evaluation (at most a quarter of training, or 60) and the planned bytes against the used ones (within 15 %). The record
holds every run; a bar is judged by the median.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cplus.base.environment import environment
from cplus.base.files import cache_folder

RESULTS = Path(__file__).parent / "results" / "first-update.json"
PLACES = ["Aldmere", "Brackholt", "Corvane", "Dunmoor", "Elswick", "Farhaven", "Garrowby", "Hestle", "Ivermouth"]
GOODS = ["rope", "tallow", "salt", "barley", "wool", "tin", "amber", "slate"]
DAYS = ["Monday", "Tuesday", "Thursday", "Saturday"]
BARS = {"first_update": 60.0, "plan": 20.0, "plan_factor": 1.5, "evaluation": 1.0, "memory": 0.15}


def rows(count: int) -> str:
    """Answers of about 74 tokens with the prompt, as JSONL."""
    draw, found = random.Random(0), {}
    while len(found) < count:
        place, goods, number = draw.choice(PLACES), draw.choice(GOODS), draw.randrange(100, 1000)
        answer = (
            f"Shipment {number} leaves {place} on {draw.choice(DAYS)} with the {draw.choice(['morning', 'evening'])} "
            f"tide. Load the {goods} at quay {draw.randrange(1, 30)} and have the papers stamped."
        )
        found[f"When does shipment {number} of {goods} leave {place}?"] = answer
    return "".join(json.dumps({"prompt": prompt, "response": answer}) + "\n" for prompt, answer in found.items())


def command(folder: Path, *more: str) -> tuple[str, float]:
    """The output of the job's command, and its seconds."""
    words = [sys.executable, "-m", "cplus", "adapt", "smollm2-135m", "--new", "rows.jsonl", "--out", "out", *more]
    begun = time.perf_counter()
    done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 2):
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}")
    return done.stdout, time.perf_counter() - begun


def measured(count: int, more: list[str]) -> dict[str, Any]:
    """One plan and one job with this many rows, from an empty cache of banks."""
    with tempfile.TemporaryDirectory(prefix="cplus-first-") as place:
        folder, cache = Path(place), Path(place) / "cache"
        cache.mkdir()
        for kept in ("models", "kernels"):  # what an earlier job has left on this machine
            (cache_folder() / kept).mkdir(parents=True, exist_ok=True)
            (cache / kept).symlink_to(cache_folder() / kept)
        os.environ["CPLUS_CACHE"] = str(cache)
        (folder / "rows.jsonl").write_text(rows(count), encoding="utf-8")
        text, planning = command(folder, "--plan", "--json", *more)
        plan = json.loads(text)
        _, seconds = command(folder, *more)
        os.environ.pop("CPLUS_CACHE")
        record = json.loads((folder / "out" / "record.json").read_text(encoding="utf-8"))
    # A job may end early because everything is learned; the plan is of all epochs.
    share = record["epochs"] / plan["settings"]["epochs"]
    expected = plan["total_seconds"] - (1 - share) * plan["seconds"]["training"]
    evaluating, training = (record["seconds"][part] for part in ("evaluating", "training"))
    used = record["actual"]["peak_bytes"]
    return {
        "first_update": record["seconds"]["first_update"],
        "plan": planning,
        "planned_seconds": expected,
        "seconds": seconds,
        "plan_factor": max(expected / seconds, seconds / expected),
        "evaluation": evaluating / max(60.0, training / 4),
        "memory": abs(plan["need"]["peak"] / used - 1),
        "planned_bytes": plan["need"]["peak"],
        "bytes": used,
        "epochs": record["epochs"],
        "phases": record["seconds"],
    }


def main() -> None:
    """Measure every number of rows and write the record."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, nargs="+", default=[60, 600])
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("more", nargs="*", help="further options of cplus adapt, after --")
    asked = options.parse_args()
    found: dict[str, Any] = {
        "environment": environment(threads=torch.get_num_threads(), device="cpu"), "bars": BARS, "rows": {},
    }  # fmt: skip
    for count in asked.rows:
        runs = []
        for number in range(asked.runs):
            runs.append(measured(count, asked.more))
            shown = {name: round(runs[-1][name], 2) for name in BARS}
            print(f"{count} rows, run {number + 1}: {shown}", file=sys.stderr, flush=True)
        medians = {name: median(run[name] for run in runs) for name in BARS}
        met = {name: value <= BARS[name] for name, value in medians.items()}
        found["rows"][str(count)] = {"medians": medians, "met": met, "runs": runs}
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({count: {"medians": own["medians"], "met": own["met"]} for count, own in found["rows"].items()}))


if __name__ == "__main__":
    main()
