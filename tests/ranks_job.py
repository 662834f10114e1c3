"""Jobs of several processes, without a launcher: `python ranks_job.py FOLDER NAME...` prints how each process ended.

One process has everything imported and forks the processes of each job, which meet over gloo. What each of them prints
on standard error is in FOLDER/NAME-RANK.err.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import scipy.stats  # noqa: F401 - the forks need not import it again
import torch
from killed_adapt import before, child, ended
from torch.optim.lr_scheduler import LambdaLR
from toyjob import asked, write_files

from cplus.cli.app import main as command
from cplus.jobs.checkpoint import Checkpoints

Patch = Callable[[int], None]
"""Parts of a batch, so that one to four processes give the same bits."""
BANK: dict[str, Any] = {"num_probes": 150, "epochs": 1}
"""Settings of a job whose bank takes several blocks of requests."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def join(rank: int, size: int, port: int, log: Path, patch: Patch, arguments: list[str]) -> None:
    """One process of a job: what torchrun would set, then the command."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), **address)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 2)
    os.dup2(2, 1)
    patch(rank)
    sys.argv = ["cplus", "adapt", *arguments]
    try:
        command()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(end.code or 0))


def run(folder: Path, name: str, size: int, arguments: list[str], patch: Patch = lambda rank: None) -> list[int]:
    """How each process of a job ended."""
    port = free_port()
    logs = [folder / f"{name}-{rank}.err" for rank in range(size)]
    pids = [child(partial(join, rank, size, port, logs[rank], patch, arguments)) for rank in range(size)]
    return [ended(pid) for pid in pids]


def settings(folder: Path, name: str, **changes: Any) -> list[str]:
    """The arguments of a job in a folder of its own."""
    place = folder / f"{name}.yaml"
    config = asked(folder, checkpoint_steps=1, out=folder / name, **changes)
    place.write_text(json.dumps(config.model_dump(mode="json")), encoding="utf-8")
    return ["--config", str(place)]


def killed(rank: int) -> None:
    """The second process dies in the middle of an epoch: the scheduler's own first step, then update 5."""
    if rank == 1:
        before(LambdaLR, "step", 6)


def killed_first(rank: int) -> None:
    """The first process, which holds the store that the others meet at, dies before its second update."""
    if rank == 0:
        before(LambdaLR, "step", 3)


def failing(rank: int) -> None:
    """The second process meets an error of its own after update 1."""
    if rank == 1:
        _after_update(1, _fail)


def stopped(rank: int) -> None:
    """The second process gets SIGTERM after update 2."""
    if rank == 1:
        _after_update(2, lambda: os.kill(os.getpid(), signal.SIGTERM))


def _fail() -> None:
    raise OSError("the disk is gone")


def _after_update(number: int, act: Callable[[], None]) -> None:
    real = Checkpoints.due

    def due(self: Checkpoints, step: int) -> bool:
        if step == number:
            act()
        return real(self, step)

    Checkpoints.due = due  # type: ignore[method-assign]


def elsewhere(folder: Path) -> Patch:
    """The second process works in a folder whose file of the same name has other rows."""
    other = folder / "elsewhere"
    other.mkdir(exist_ok=True)
    rows = (folder / "new.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (other / "new.jsonl").write_text("".join(rows[:-1]), encoding="utf-8")
    return lambda rank: os.chdir(other if rank == 1 else folder)


def not_shared(folder: Path) -> Patch:
    """The second process is where the job's folder is not."""
    other = folder / "another node"
    other.mkdir(exist_ok=True)
    return lambda rank: os.chdir(other if rank == 1 else folder)


def scenario(folder: Path, name: str) -> list[int]:
    """How the processes of one job ended; `resumed-4-NAME` resumes the job in the folder NAME in four of them."""
    if name.startswith("resumed-"):
        _, size, job = name.split("-", 2)
        return run(folder, name, int(size), ["--resume", str(folder / job)])
    if name == "other":
        return run(folder, name, 2, settings(folder, name, new="new.jsonl"), elsewhere(folder))
    if name == "ddp":
        return run(folder, name, 2, settings(folder, name, sharding="ddp"))
    if name == "lora":
        return run(folder, name, 2, settings(folder, name, lora={"r": 4}, keep_best=True))
    if name == "curvature":
        return run(folder, name, 2, settings(folder, name, sharding="ddp", method="cplus-curvature", epochs=1))
    if name == "three":
        return run(folder, name, 3, settings(folder, name))
    if name == "bank":
        os.environ["CPLUS_CACHE"] = str(folder / "cache of two")
        return run(folder, name, 2, settings(folder, name, **BANK))
    if name == "unmet":
        own = {"epochs": 1, "method": "cpl", "sharding": "ddp", "require": ["acquisition>=0.7"]}
        return run(folder, name, 2, settings(folder, name, **own))
    if name == "unshared":
        arguments = [*settings(folder, name), "--out", name]
        return run(folder, name, 2, arguments, not_shared(folder))
    patches: dict[str, Patch] = {"killed": killed, "killed-first": killed_first, "failing": failing, "stopped": stopped}
    return run(folder, name, 2, settings(folder, name), patches.get(name, lambda rank: None))


def main(folder: Path, names: list[str]) -> None:
    """The named jobs, one after another."""
    torch.set_num_threads(1)
    write_files(folder)
    print(json.dumps({name: scenario(folder, name) for name in names}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
