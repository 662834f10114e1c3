"""What is done to a process at one of its durable operations: a sync or a rename, counted from its start."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Act = Callable[[], None]
FILLER = "filler"
DAY = 86_400


def at_operation(nth: int, act: Act) -> None:
    """Let the n-th sync or rename of this process be preceded by an act."""
    left = [nth]

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **rest: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                act()
            return real(*args, **rest)

        return call

    for name in ("fsync", "replace", "rename"):
        setattr(os, name, wrapped(getattr(os, name)))


def fill(disk: Path) -> None:
    """Leave no byte on the disk; without a small disk of our own, forbid files of more than a few bytes."""
    if not os.path.ismount(disk):
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        return
    with (disk / FILLER).open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def empty(disk: Path) -> None:
    """Give the bytes back."""
    (disk / FILLER).unlink(missing_ok=True)


def _set_mode(folder: Path, mode: int) -> None:
    for place in (folder, *folder.rglob("*")):
        if place.is_dir():
            place.chmod(mode)


def lock_up(folder: Path) -> None:
    """Make every folder of a tree read-only, for this process too if it is root's."""
    _set_mode(folder, 0o555)
    if os.geteuid() == 0:
        _obey_permissions()


def unlock(folder: Path) -> None:
    """Make the tree writable again."""
    _set_mode(folder, 0o755)


def _obey_permissions() -> None:
    """Give up root's right to write anywhere, for the rest of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=Ii", 0x20080522, 0)  # version 3 of the interface, this process
    data = ctypes.create_string_buffer(24)
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    words = list(struct.unpack("=6I", data.raw))
    words[0] &= ~0b10  # CAP_DAC_OVERRIDE, effective
    if libc.capset(header, struct.pack("=6I", *words)):
        raise OSError(ctypes.get_errno(), "capset")


def clock_back() -> None:
    """This process lives a day ago."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() - DAY
    time.time_ns = lambda: now_ns() - DAY * 10**9


def from_the_future(folder: Path) -> None:
    """Let every file be from tomorrow, as after a clock that jumped back."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() + DAY,) * 2)


@contextmanager
def small_disk(place: Path, megabytes: int = 256) -> Iterator[str]:
    """A disk of its own at `place`, where this process may mount one; yields what the fault will really be."""
    place.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield "a full tmpfs" if mounted else "a limit on file sizes"
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)
