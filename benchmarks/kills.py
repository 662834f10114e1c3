"""A job of two processes, one of which is killed at a random moment, then resumed by two, one and four processes.

OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= python benchmarks/kills.py --kills 10 --out benchmarks/results/kills.json

The rows are those of `python -m cplus.toy.rows`. Each kill has a cache of its own, so that it may hit the writing of
the bank. Weights are compared bit for bit with those of one process that was never stopped; a batch has four parts
whatever the number of processes. The file is written after each kill; the same command continues.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from forked import cplus, ended, started
from safetensors.torch import load_file

from cplus.base import files
from cplus.base.environment import environment
from cplus.jobs.checkpoint import index_of
from cplus.jobs.folder import Folder
from cplus.toy import rows

SETTINGS = ["--interface", "cloze", "--lr", "1e-3", "--epochs", "3", "--set", "checkpoint_steps=1", "--stop", "never"]
SETTINGS += ["--set", "micro_batches=4"]
RESUMED_BY = (2, 1, 4)
MINUTE = 60.0
ROUNDING = 1e-6


def done(size: int, arguments: list[str], log: Path) -> float:
    """The seconds of a job that ends well."""
    begun = time.perf_counter()
    codes = ended(started(size, lambda rank: cplus(["adapt", *arguments]), log))
    if any(codes):
        sys.exit(f"a job of {size} processes ended with {codes}:\n{log.read_text(encoding='utf-8')}")
    return time.perf_counter() - begun


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The weights that a job wrote."""
    return load_file(out / "model" / "model.safetensors")


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The relative distance of two models' weights, all of them as one vector."""
    a, b = (torch.cat([each[name].double().flatten() for name in right]) for each in (left, right))
    return float((a - b).norm() / b.norm())


def apart(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The distance of two models, how many weights differ by more than ROUNDING, and the distance of all others.

    Where rounding decides the sign of a gradient, AdamW and the gate take another step: its size is the rate's.
    """
    far = {name: (left[name] - right[name]).abs() > ROUNDING for name in right}
    others = {name: torch.where(far[name], right[name], left[name]) for name in right}
    counts = {"weights": sum(own.numel() for own in far.values()), "apart": sum(int(own.sum()) for own in far.values())}
    return {"distance": distance(left, right), **counts, "distance_of_others": distance(others, right)}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two models have the same bits."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def killed(draw: random.Random, seconds: float, out: Path, arguments: list[str], log: Path) -> dict[str, Any] | None:
    """Kill a random process of a job after a random part of its usual time; None if the job had ended by then."""
    rank, moment = draw.randrange(2), draw.uniform(0.0, seconds)
    begun = time.perf_counter()
    pids = started(2, lambda rank: cplus(["adapt", *arguments, "--out", str(out)]), log)
    time.sleep(moment)
    if (out / "record.json").exists():
        ended(pids)
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[rank], signal.SIGKILL)
    struck = time.perf_counter()
    codes = ended(pids)
    return {
        "rank": rank,
        "after_seconds": round(struck - begun, 2),
        "codes": codes,
        "seconds_until_all_ended": round(time.perf_counter() - struck, 2),
        "where": where(Folder(out)),
        "sentence": reported(log.read_text(encoding="utf-8")),
    }


def reported(log: str) -> str:
    """The error in what a job printed, without the advice, which has the names of folders."""
    return next((line.partition("; ")[0] for line in log.splitlines() if line.startswith("error: ")), "")


def where(folder: Folder) -> str:
    """How far a job had come, by what it left."""
    if index_of(folder.checkpoint).is_file():
        return f"after update {files.read_json(index_of(folder.checkpoint))['step']}"
    for place, words in (
        (folder.bank, "bank written"),
        (folder.answers, "answers written"),
        (folder.settings, "begun"),
    ):
        if place.exists():
            return words
    return "before it began"


def one_kill(number: int, draw: random.Random, seconds: float, base: Path, arguments: list[str]) -> dict[str, Any]:
    """A kill, and the three jobs that resume from what it left."""
    found = None
    while found is None:
        place = base / f"kill{number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        os.environ["CPLUS_CACHE"] = str(place / "cache")
        found = killed(draw, seconds, place / "out", arguments, place / "log")
    one = weights(base / "one")
    for size in RESUMED_BY:
        out = place / f"by{size}"
        again = ["--resume", str(out)]
        if (place / "out" / "settings.json").exists():
            shutil.copytree(place / "out", out)
        else:
            again = [*arguments, "--out", str(out)]  # it was killed before there was anything to resume
        done(size, again, place / f"log{size}")
        found[f"by_{size}"] = {"distance": distance(weights(out), one), "bitwise": same(weights(out), one)}
    return found


def main() -> None:
    """Kill, resume, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        base = Path(made)
        rows.write(base)
        inputs = [
            f"--{option}={base / name}.jsonl"
            for option, name in (("new", "new"), ("anchors", "keep"), ("past", "past"))
        ]
        arguments = ["toy", *inputs, *SETTINGS]
        os.environ["CPLUS_CACHE"] = str(base / "cache")
        done(1, [*arguments, "--out", str(base / "one")], base / "one.log")
        os.environ["CPLUS_CACHE"] = str(base / "cache of two")
        seconds = done(2, [*arguments, "--out", str(base / "two")], base / "two.log")
        between = apart(weights(base / "two"), weights(base / "one"))
        between["bitwise"] = same(weights(base / "two"), weights(base / "one"))
        found = files.read_json(asked.out)["kills"] if asked.out.is_file() else []
        for number in range(len(found), asked.kills):
            found.append(one_kill(number, random.Random(f"{asked.seed}/{number}"), seconds, base, arguments))
            print(found[-1], flush=True)
            shutil.rmtree(base / f"kill{number}")
            files.write_json(asked.out, report(found, {"seconds": round(seconds, 1), **between}))
    ended_soon = all(own["seconds_until_all_ended"] < MINUTE for own in found)
    bitwise = between["bitwise"] and all(own[f"by_{size}"]["bitwise"] for own in found for size in RESUMED_BY)
    sys.exit(0 if ended_soon and bitwise else 1)


def report(found: list[dict[str, Any]], undisturbed: dict[str, Any]) -> dict[str, Any]:
    """All kills and the largest of their figures."""
    return {
        "settings": SETTINGS,
        "two_processes": undisturbed,
        "largest_distance": max(own[f"by_{size}"]["distance"] for own in found for size in RESUMED_BY),
        "bitwise": {str(size): sum(own[f"by_{size}"]["bitwise"] for own in found) for size in RESUMED_BY},
        "longest_end": max(own["seconds_until_all_ended"] for own in found),
        "kills": found,
        "environment": environment(threads=1, device="cpu"),
    }


if __name__ == "__main__":
    main()
