"""Processes of one job for benchmarks: forked from this one, with what torchrun would set in their environment."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from cplus.cli.app import main


def started(size: int, work: Callable[[int], None], log: Path | None = None) -> list[int]:
    """The ids of the processes; each does `work` with its rank and prints into the log."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return [_child(rank, size, port, work, log) for rank in range(size)]


def ended(pids: list[int]) -> list[int]:
    """How each process ended: its exit code, or minus the signal that killed it."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def cplus(arguments: list[str]) -> None:
    """The command in this process."""
    sys.argv = ["cplus", *arguments]
    main()


def _child(rank: int, size: int, port: int, work: Callable[[int], None], log: Path | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        if size > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ.update({**address, **{name: str(value) for name, value in numbers.items()}})
        if log is not None:
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
            os.dup2(2, 1)
        work(rank)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
