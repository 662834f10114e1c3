"""A lock for one process at a time: it names its holder and is released when the holder ends."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from cplus.base.files import open_itself

_PAUSE = 0.2
_descriptors: set[int] = set()


class Held(ValueError):
    """Another process holds the lock."""


@contextmanager
def holding(
    path: Path,
    *,
    wait: float = 0.0,
    notify: Callable[[str], None] = lambda sentence: None,
    otherwise: str = "wait for it or choose another place",
) -> Iterator[None]:
    """Hold the lock file `path`; if another process still holds it after `wait` seconds, raise an error naming it.

    The lock belongs to the kernel and is released when the process ends, even by a crash; the file only tells others
    who holds it. `notify` is called once if the lock has to be waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    owner, begun, waiting = os.getpid(), time.monotonic(), False
    while (descriptor := _acquired(path)) is None:
        sentence = f"{path.parent if path.name == '.lock' else path} is in use by {holder(path)}"
        if time.monotonic() - begun >= wait:
            raise Held(f"{sentence}; {otherwise}")
        if not waiting:
            notify(f"{sentence}; waiting for it")
            waiting = True
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        if os.getpid() == owner:
            with suppress(OSError):  # in a folder that became read-only the file remains, which blocks nobody
                path.unlink(missing_ok=True)  # while still held: a process that just opened it sees that it is gone
            _descriptors.discard(descriptor)
            os.close(descriptor)


def beside(path: Path) -> Path:
    """The lock file for a path that does not exist yet or that a rename will replace.

    >>> beside(Path("banks/csqa")).as_posix()
    'banks/.csqa.lock'
    """
    return path.with_name(f".{path.name}.lock")


def holder(path: Path) -> str:
    """The process that a lock file names."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8") or "another process"
    return "another process"  # just released


def _acquired(path: Path) -> int | None:
    """The descriptor of the lock file, now locked and naming this process; None if another process holds it."""
    while True:
        descriptor = open_itself(path, os.O_RDWR | os.O_CREAT)
        kept = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_still(path, descriptor):
                continue  # its holder removed it between the two lines above
            os.ftruncate(descriptor, 0)  # remove what a dead process left in it
            since = datetime.now(UTC).isoformat(timespec="seconds")
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {since}".encode())
            kept = True
        except BlockingIOError:
            return None
        finally:
            _descriptors.add(descriptor) if kept else os.close(descriptor)
        return descriptor


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _close_in_children() -> None:
    """Close the locks in forked children, which share them with the parent and could outlive it."""
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_children)
