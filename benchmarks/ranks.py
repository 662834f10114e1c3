"""A job of several processes: where its time goes, and the memory of each process.

OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= python benchmarks/ranks.py {time,memory} --out benchmarks/results

`time`: the README's job on the toy, one and two processes; communication is the time inside collectives, which includes
waiting for the other process. `memory`: two updates of smollm2-135m; the peak of each process's resident memory less
what it had before the job, when everything was imported.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import cplus, ended, started
from timing import finish, status

from cplus.base.files import read_json
from cplus.core.guard import Guard
from cplus.data.examples import lines
from cplus.toy.world import taught, untaught

COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
    "broadcast",
    "broadcast_object_list",
    "all_gather_object",
    "barrier",
)


def job(arguments: list[str], place: Path) -> None:
    """One process: the command, and what it measured as JSON."""
    before, spent, begun = status("VmRSS"), Counter[str](), time.perf_counter()
    measure(spent)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the process that this one was forked from
    try:
        cplus(["adapt", *arguments])
    finally:
        found = {"total": time.perf_counter() - begun, "peak": status("VmHWM") - before, **spent}
        place.write_text(json.dumps(found), encoding="utf-8")


def measure(spent: Counter[str]) -> None:
    """Measure the time inside collectives and refreshes of this process."""
    inside: list[str] = []

    def timed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def call(*args: Any, **named: Any) -> Any:
            if "communication" in inside:  # one collective by another
                return real(*args, **named)
            begun = time.perf_counter()
            inside.append(name)
            try:
                return real(*args, **named)
            finally:
                spent[" in ".join(reversed(inside))] += time.perf_counter() - begun
                inside.pop()

        return call

    for name in COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, timed("communication", getattr(dist, name)))
    Guard.refresh = timed("evidence", Guard.refresh)  # type: ignore[method-assign]


def run(folder: Path, size: int, arguments: list[str]) -> list[dict[str, float]]:
    """What each process of a job measured; the cache is its own."""
    os.environ["CPLUS_CACHE"] = str(folder / f"cache{size}")
    own = [*arguments, "--out", str(folder / f"by{size}")]
    codes = ended(started(size, lambda rank: job(own, folder / f"by{size}.{rank}.json"), folder / f"log{size}"))
    if any(codes):
        raise SystemExit(f"{size} processes ended with {codes}:\n{(folder / f'log{size}').read_text()}")
    return [read_json(folder / f"by{size}.{rank}.json") for rank in range(size)]


def rows(folder: Path, new: int, past: int) -> list[str]:
    """The first of the README's rows as files, and the options that name them."""
    known = taught("harbours")
    found = ["--interface", "cloze"]
    for name, facts in {"new": untaught("harbours")[:new], "anchors": known[:8], "past": known[8 : 8 + past]}.items():
        path = folder / f"{name}.jsonl"
        path.write_text(lines(facts), encoding="utf-8")
        found += [f"--{name}", str(path)]
    return found


def parts(folder: Path, size: int, spent: dict[str, float]) -> dict[str, float]:
    """Seconds by part, from the job's record and what its first process measured, after Python and imports."""
    seconds = read_json(folder / f"by{size}" / "record.json")["seconds"]
    evidence = spent.get("evidence", 0.0)
    return {
        "reading": seconds.get("loading", 0.0),
        "answering": seconds.get("evaluating", 0.0),
        "writing probes": seconds.get("writing probes", 0.0),
        "evidence": evidence,
        "updates": seconds.get("training", 0.0) - evidence,
        "saving": seconds.get("saving", 0.0),
        "of all: communication": sum(took for name, took in spent.items() if name.startswith("communication")),
        "of evidence: communication": spent.get("communication in evidence", 0.0),
        "total": spent["total"],
    }


def measure_time(folder: Path) -> dict[str, Any]:
    """The README's job by one process and by two."""
    arguments = ["toy", *rows(folder, 32, 128), "--lr", "1e-3"]
    found = {str(size): parts(folder, size, run(folder, size, arguments)[0]) for size in (1, 2)}
    percent = {
        size: {part: round(100 * value / own["total"], 1) for part, value in own.items()} for size, own in found.items()
    }
    return {"seconds": found, "percent": percent}


def measure_memory(folder: Path) -> dict[str, Any]:
    """Two updates of smollm2-135m with the gate, by one process and by two; no probes need be written."""
    settings = ["--lr", "1e-5", "--epochs", "1", "--batch-size", "4", "--method", "cplus-anchors", "--stop", "never"]
    arguments = ["smollm2-135m", *rows(folder, 8, 4), *settings]
    peaks = {str(size): [own["peak"] / 1e6 for own in run(folder, size, arguments)] for size in (1, 2)}
    return {"settings": settings, "peak_megabytes": peaks, "share": max(peaks["2"]) / peaks["1"][0], "bar": 0.6}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        report = {"time": measure_time, "memory": measure_memory}[asked.what](Path(made))
    finish(f"ranks-{asked.what}", report, asked.out)


if __name__ == "__main__":
    main()
