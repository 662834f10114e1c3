"""`cplus adapt` killed with SIGKILL at each moment: `python killed_adapt.py FOLDER` prints how each process ended.

One process has everything imported and forks a child for each moment, which runs the command until it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.optim.lr_scheduler import LambdaLR
from toyjob import asked, write_files

from cplus.cli.app import main as command
from cplus.jobs import adapt, outputs
from cplus.training import measure


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


def ended(pid: int) -> int:
    """How a child ended: its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


UPDATES = 9
MOMENTS: dict[str, tuple[Callable[[], None], int]] = {
    "the first epoch": (lambda: before(LambdaLR, "step", 3), 1),  # the scheduler's own first step, then update 2
    "half a checkpoint": (lambda: half_written(5), 4),
    "the evaluation of an epoch": (lambda: before(measure, "predict", 6), 6),
    "the final evaluation": (
        lambda: before(outputs, "answer", 2, lambda model, group, config, when, *_: when == "after"),
        UPDATES,
    ),
}
"""How a process dies, and the last update whose checkpoint is whole by then."""


def attempt(patch: Callable[[], None], settings: Path) -> None:
    """The command, up to the moment."""
    patch()
    sys.argv = ["cplus", "adapt", "--config", str(settings)]
    command()


def main(folder: Path) -> None:
    """One job for each moment, in a folder of the moment's name."""
    torch.set_num_threads(1)
    write_files(folder)
    # In this process, so that the children inherit the compiled kernels.
    adapt.adapt(asked(folder, method="cpl", epochs=1, evaluate_every=0, out=folder / "whole"))
    ends = {}
    for name, (patch, _) in MOMENTS.items():
        config = asked(folder, method="cpl", checkpoint_steps=1, out=folder / name)
        settings = folder / f"{name}.yaml"
        settings.write_text(json.dumps(config.model_dump(mode="json")), encoding="utf-8")
        ends[name] = ended(child(partial(attempt, patch, settings)))
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
