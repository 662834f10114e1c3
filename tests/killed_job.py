"""A job killed with SIGKILL at moment after moment: `python killed_job.py FOLDER SEED` prints how each process ended.

One process does the job once, undisturbed, and forks a child for each moment, which goes on until it is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.optim.lr_scheduler import LambdaLR
from toyjob import asked, write_files
from transformers import PreTrainedTokenizerBase

from cplus import models
from cplus.core import evidence
from cplus.jobs.adapt import adapt, resume
from cplus.jobs.folder import Folder
from cplus.probes import build
from cplus.training import measure

Patch = Callable[[random.Random], None]


def die() -> None:
    """What no program can catch."""
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, nth: int = 1, where: Callable[..., bool] = lambda *a, **k: True) -> None:
    """Die when the function is called the n-th time, before it does anything."""
    real, left = getattr(owner, name), [nth]

    def wrapped(*args: Any, **rest: Any) -> Any:
        if where(*args, **rest):
            left[0] -= 1
            if not left[0]:
                die()
        return real(*args, **rest)

    setattr(owner, name, wrapped)


def after_replacing(name: str) -> None:
    """Die just after a file has taken its place."""
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        real(source, target)
        if Path(target).name == name:
            die()

    os.replace = replace  # type: ignore[assignment]


def half_written(nth: int = 1) -> None:
    """Die when half of the n-th checkpoint is on the disk."""
    real, left = torch.save, [nth]

    def save(value: Any, file: BinaryIO) -> None:
        real(value, file)
        left[0] -= 1
        if left[0]:
            return
        file.flush()
        os.truncate(file.fileno(), file.tell() // 2)
        die()

    torch.save = save  # type: ignore[assignment]


def replacing(name: str, nth: int = 1) -> None:
    before(os, "replace", nth, lambda source, target: Path(target).name == name)


MOMENTS: dict[str, Patch | None] = {
    "loading": lambda draw: before(models.loading, "fingerprint"),
    "answers": lambda draw: replacing("before.json"),
    "bank": lambda draw: before(build, "seal"),
    "any moment of the training, 1": None,
    "half a checkpoint": lambda draw: half_written(),
    "refresh": lambda draw: before(evidence, "take_gradients"),
    "after an update": lambda draw: before(LambdaLR, "step", draw.randint(2, 4)),
    "before a checkpoint's place": lambda draw: replacing("checkpoint.pt", draw.randint(1, 2)),
    "any moment of the training, 2": None,
    "after a checkpoint's place": lambda draw: after_replacing("checkpoint.pt"),
    "look": lambda draw: before(measure, "predict", draw.randint(1, 2)),
    "model": lambda draw: before(PreTrainedTokenizerBase, "save_pretrained"),
    "record": lambda draw: replacing("record.json"),
    "work": lambda draw: before(Folder, "clear_work"),
}


def ended(pid: int) -> int:
    """How a child ended: its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def child(work: Callable[[], object]) -> int:
    """The process of one attempt."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def killed_by_clock(pid: int, checkpoint: Path, draw: random.Random) -> None:
    """Kill a process a moment after its first checkpoint, wherever it is."""
    seen = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
    while not checkpoint.exists() or checkpoint.stat().st_mtime_ns == seen:
        time.sleep(0.001)
    time.sleep(draw.uniform(0.0, 0.05))
    os.kill(pid, signal.SIGKILL)


def main(folder: Path, seed: int) -> None:
    """The whole job once without a kill, then once with all of them."""
    torch.set_num_threads(1)
    write_files(folder)
    config = asked(folder, epochs=6, checkpoint_steps=1, evaluate_rows=4)
    # In this process, so that the children inherit the compiled kernels; from a cache of its own.
    cache = os.environ["CPLUS_CACHE"]
    os.environ["CPLUS_CACHE"] = f"{cache}-of-its-own"
    adapt(config.model_copy(update={"out": folder / "whole"}))
    os.environ["CPLUS_CACHE"] = cache
    draw = random.Random(seed)
    out = folder / "out"

    def attempt(patch: Patch | None) -> None:
        if patch is not None:
            patch(draw)
        resume(out) if (out / "settings.json").exists() else adapt(config)

    ends = {}
    for name, patch in MOMENTS.items():
        pid = child(partial(attempt, patch))
        if patch is None:
            killed_by_clock(pid, out / "work" / "checkpoint.pt", draw)
        ends[name] = ended(pid)
    ends["the end"] = ended(child(partial(attempt, None)))
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
