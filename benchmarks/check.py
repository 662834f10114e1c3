"""Does `cplus check` rank two fine-tuned models as their receipts do, and how long does it take?

OMP_NUM_THREADS=1 python benchmarks/check.py [--data-dir DIR] [--work DIR] [--epochs 5]

Plain fine-tuning and CPLUS learn 40 questions of arc_easy with terse answers, without anchors; both receipts measure 40
held-out rows that the base model wrote. Then each model is checked by a command of its own. A finished job is not
repeated and an interrupted one continues.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cplus.base.files import read_json, write_json, write_text
from cplus.base.terminal import print_json
from cplus.data.examples import Choice
from cplus.data.tasks import load_task
from cplus.jobs.adapt import adapt, resume
from cplus.jobs.settings import AdaptConfig

MODEL, METHODS, ROWS = "smollm2-135m", ("sft", "cplus"), 40


def terse(options: argparse.Namespace) -> str:
    """The new rows as a file."""
    drawn = random.Random("terse").sample(load_task("arc_easy", options.data_dir).examples, ROWS)
    rows = [{"prompt": e.question, "response": e.choices[e.answer]} for e in drawn if isinstance(e, Choice)]
    path = options.work / "new.jsonl"
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def receipt(method: str, new: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one job on past and new rows."""
    out = options.work / method
    if (out / "settings.json").is_file():
        done = resume(out)
    else:
        done = adapt(AdaptConfig(model=MODEL, new=new, method=method, epochs=options.epochs, stop="never", out=out))
    free = done.record["figures"]["free"]
    return {"past": free["past"]["loss"], "updates": done.record["steps"], "curve": done.record["curve"][-1]}


def check(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the command says about one model, with the seconds it took by the clock and by the processor."""
    begun, used = time.perf_counter(), _processor()
    command = [sys.executable, "-m", "cplus", "check", MODEL, str(options.work / method / "model"), "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    seconds = {"clock": time.perf_counter() - begun, "processor": _processor() - used}
    return {"loss": found["loss"], "answers": found["answers"], "effect": found["effect"], "seconds": seconds}


def _processor() -> float:
    """Seconds of processor time of all commands so far."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> None:
    """Train, check and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--work", type=Path, default=Path("check-work"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/check.json"))
    options = parser.parse_args()
    new = terse(options)
    rows = {method: {"receipt": receipt(method, new, options), "check": check(method, options)} for method in METHODS}
    write_json(options.out, {"model": MODEL, "rows": ROWS, "epochs": options.epochs, "methods": rows})
    print_json(read_json(options.out))


if __name__ == "__main__":
    main()
