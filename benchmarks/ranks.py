"""A job of several processes: where its time goes, and the memory of each process.

OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= python benchmarks/ranks.py time --out benchmarks/results/ranks-time.json
OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= python benchmarks/ranks.py memory --out benchmarks/results/ranks-memory.json

`time`: the README's job on the toy, one and two processes; communication is the time inside collectives, which includes
waiting for the other process. `memory`: two updates of smollm2-135m; the peak of each process's resident memory less
what it had before the job, when everything was imported.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from cplus.base import files
from cplus.base.environment import environment

COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "all_reduce",
    "broadcast",
    "broadcast_object_list",
    "all_gather_object",
    "barrier",
)
BAR = 0.6


def job(place: Path, rank: int) -> None:
    """One process: `place` has its command; what it measured is written beside."""
    asked = json.loads(place.read_text(encoding="utf-8"))
    import psutil
    import torch

    torch.set_num_threads(1)
    before = psutil.Process().memory_info().rss
    spent: Counter[str] = Counter()
    peaks: dict[str, int] = {}
    _timed(spent, peaks)
    sys.argv = ["cplus", "adapt", *asked]
    from cplus.cli.app import main as command

    begun, code = time.perf_counter(), 0
    try:
        command()
    except SystemExit as end:
        code = int(end.code or 0)
    _noted(peaks, "the rest")
    found = {"seconds": time.perf_counter() - begun, "peak": max(peaks.values()) - before, "before": before}
    found |= {"spent": dict(spent), "peaks": {name: value - before for name, value in peaks.items()}}
    place.with_suffix(f".{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    sys.exit(code)


def _noted(peaks: dict[str, int], part: str) -> None:
    """Note the highest resident memory since the last call as this part's, and begin anew."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    peaks[part] = max(peak, peaks.get(part, 0))
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _timed(spent: Counter[str], peaks: dict[str, int]) -> None:
    """Measure the time inside collectives and refreshes of this process, and its memory by part."""
    import torch.distributed as dist

    from cplus.core.guard import Guard
    from cplus.core.optim import AdamW
    from cplus.jobs import adapt
    from cplus.jobs.checkpoint import Checkpoints
    from cplus.training import measure
    from cplus.training.driver import Training

    inside: list[str] = []

    def timed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def call(*args: Any, **named: Any) -> Any:
            if name == "communication" and name in inside:  # one collective by another
                return real(*args, **named)
            begun = time.perf_counter()
            if name != "communication":
                _noted(peaks, f"before {name}")
            inside.append(name)
            try:
                return real(*args, **named)
            finally:
                inside.pop()
                if name != "communication":
                    _noted(peaks, name)
                took = time.perf_counter() - begun
                spent[name] += took
                if name == "communication":
                    spent[f"communication in {inside[-1] if inside else 'the rest'}"] += took

        return call

    for name in COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, timed("communication", getattr(dist, name)))
    Guard.refresh = timed("evidence", Guard.refresh)  # type: ignore[method-assign]
    Training.finish = timed("gathering the result", Training.finish)  # type: ignore[method-assign]
    Checkpoints.save = timed("saving", Checkpoints.save)  # type: ignore[method-assign]
    AdamW.step = timed("update", AdamW.step)  # type: ignore[method-assign]
    measure.curve_figures = timed("evaluating", measure.curve_figures)
    adapt.curve_figures = measure.curve_figures  # type: ignore[attr-defined]


def run(folder: Path, name: str, size: int, arguments: list[str]) -> list[dict[str, Any]]:
    """What each process of a job measured."""
    place = folder / f"{name}.txt"
    place.write_text(json.dumps([*arguments, "--out", str(folder / name)]), encoding="utf-8")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    processes = []
    for rank in range(size):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        own = {**os.environ, **address, **{key: str(value) for key, value in numbers.items()}} if size > 1 else None
        command = [sys.executable, __file__, "job", "--out", str(place), "--rank", str(rank)]
        processes.append(subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL))
    if any(process.wait() for process in processes):
        sys.exit(f"{name}: a process failed")
    return [json.loads(place.with_suffix(f".{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]


def rows(folder: Path, new: int, past: int) -> list[str]:
    """The first of the README's rows as files, and the options that name them."""
    from cplus.toy import rows as toy

    toy.write(folder)
    options = {"new": ("new", new), "anchors": ("keep", 8), "past": ("past", past)}
    found = []
    for option, (name, count) in options.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:count]), encoding="utf-8")
        found += [f"--{option}", str(path)]
    return [*found, "--interface", "cloze"]


def parts(folder: Path, name: str, found: dict[str, Any]) -> dict[str, float]:
    """Seconds by part, from the job's record and what its first process measured, after Python and imports."""
    seconds = json.loads((folder / name / "record.json").read_text(encoding="utf-8"))["actual"]["seconds"]
    spent = found["spent"]
    shares = {
        "reading": seconds.get("loading", 0.0),
        "answering": seconds.get("evaluating", 0.0),
        "writing probes": seconds.get("writing probes", 0.0),
        "evidence": spent.get("evidence", 0.0),
        "updates": seconds.get("training", 0.0) - spent.get("evidence", 0.0),
        "saving": seconds.get("saving", 0.0),
        "of all: communication": spent.get("communication", 0.0),
        "of evidence: communication": spent.get("communication in evidence", 0.0),
        "total": found["seconds"],
    }
    return {part: round(value, 3) for part, value in shares.items()}


def percent(seconds: dict[str, float]) -> dict[str, float]:
    """Each part's share of the whole."""
    return {part: round(100 * value / seconds["total"], 1) for part, value in seconds.items()}


def measure_time(folder: Path) -> dict[str, Any]:
    """The README's job by one process and by two, each with a cache of its own."""
    arguments = ["toy", *rows(folder, 32, 128), "--lr", "1e-3"]
    found = {}
    for size in (1, 2):
        os.environ["CPLUS_CACHE"] = str(folder / f"cache{size}")
        name = f"by{size}"
        found[str(size)] = parts(folder, name, run(folder, name, size, arguments)[0])
    return {
        "settings": arguments[7:],
        "seconds": found,
        "percent": {size: percent(seconds) for size, seconds in found.items()},
    }


def measure_memory(folder: Path, known: Path) -> dict[str, Any]:
    """Two updates of smollm2-135m with the gate; the probes are rows that are given, so that none need be written.

    What is in the file `known` is not measured again.
    """
    settings = ["--lr", "1e-5", "--epochs", "1", "--batch-size", "4", "--num-probes", "8", "--stop", "never"]
    arguments = ["smollm2-135m", *rows(folder, 8, 4), "--set", f"bank={bank(folder)}", *settings]
    found: dict[str, list[dict[str, float]]] = json.loads(known.read_text(encoding="utf-8")) if known.is_file() else {}
    for size in (1, 2):
        if str(size) not in found:
            measured = run(folder, f"by{size}", size, arguments)
            found[str(size)] = [{"all": own["peak"] / 1e6, **_megabytes(own["peaks"])} for own in measured]
            files.write_json(known, found)
    peaks = {size: [round(own["all"], 1) for own in each] for size, each in found.items()}
    share = max(peaks["2"]) / peaks["1"][0]
    return {"settings": settings, "peak_megabytes": peaks, "by_part": found, "share": round(share, 4), "bar": BAR}


def _megabytes(peaks: dict[str, int]) -> dict[str, float]:
    return {part: round(value / 1e6, 1) for part, value in peaks.items()}


def bank(folder: Path) -> Path:
    """A sealed bank whose probes are given rows."""
    from cplus import models
    from cplus.data import interfaces
    from cplus.data.readers import read_file
    from cplus.models.decoding import LocalEngine
    from cplus.probes.bank import Probe, seal
    from cplus.probes.build import identify
    from cplus.probes.settings import ProbeSettings
    from cplus.toy.world import taught

    base = models.load("smollm2-135m", device="cpu")
    bound = interfaces.build("cloze", base.tokenizer)
    anchors = read_file(folder / "keep.jsonl")
    settings = ProbeSettings(num_probes=8)
    identity = identify(base, bound, anchors, settings, LocalEngine(base.model, base.tokenizer))
    given = taught("harbours")[200:208]
    probes = [Probe(example=own, confidence=1.0, request=i, shots=(), topic=None) for i, own in enumerate(given)]
    counts = {"requests": 8, "accepted": 8, "rejected": {}}
    seal(folder / "bank", probes, {**identity, "counts": counts, "yield": 1.0})
    return folder / "bank"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("time", "memory", "job"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=0)
    asked = parser.parse_args()
    if asked.what == "job":
        job(asked.out, asked.rank)
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        known = asked.out.with_suffix(".part.json")
        report = measure_time(place) if asked.what == "time" else measure_memory(place, known)
    files.write_json(asked.out, {**report, "environment": environment(threads=1, device="cpu")})
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
