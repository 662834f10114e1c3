"""One process at a time: a lock that names its holder and dies with it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

_PAUSE = 0.2
_descriptors: set[int] = set()


class Held(ValueError):
    """Another process works there."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who wrote itself into a lock; `started` tells a process from a later one of the same number."""

    pid: int
    host: str
    started: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@contextmanager
def holding(
    path: Path,
    *,
    wait: float = 0.0,
    told: Callable[[str], None] = lambda sentence: None,
    otherwise: str = "wait for it or choose another place",
) -> Iterator[None]:
    """Hold the lock file `path` for this process alone, or say who holds it after `wait` seconds.

    The kernel keeps the lock, so that it ends with the process, however that ends; the file only tells others who it
    is. `told` hears once that another is waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _close_in_children()
    owner, begun, waiting = os.getpid(), time.monotonic(), False
    while (descriptor := _taken(path)) is None:
        sentence = f"{path.parent if path.name == '.lock' else path}: another process works there, {_name(path)}"
        if time.monotonic() - begun >= wait:
            raise Held(f"{sentence}; {otherwise}")
        if not waiting:
            told(f"{sentence}; waiting for it")
            waiting = True
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        if os.getpid() == owner:
            with suppress(OSError):  # in a folder that became read-only it stays, and holds nobody up
                path.unlink(missing_ok=True)  # still held: whoever opened it meanwhile sees that it is gone
            _descriptors.discard(descriptor)
            os.close(descriptor)


def beside(path: Path) -> Path:
    """The lock file of something that is not there yet, or that a rename will replace.

    >>> beside(Path("banks/csqa")).as_posix()
    'banks/.csqa.lock'
    """
    return path.with_name(f".{path.name}.lock")


def holder(path: Path) -> Holder | None:
    """Who wrote itself into a lock file; None where that cannot be read."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # just released, or not written yet


def _name(path: Path) -> str:
    return str(holder(path) or "which has not said its name yet")


def _taken(path: Path) -> int | None:
    """The locked file's descriptor, this process written into it; None where another has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        kept = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_still(path, descriptor):
                continue  # its holder removed it between the two lines above
            os.ftruncate(descriptor, 0)  # what a dead process left in it
            os.write(descriptor, json.dumps(asdict(_self())).encode())
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


def _self() -> Holder:
    import psutil  # type: ignore[import-untyped]

    started = datetime.fromtimestamp(psutil.Process().create_time(), UTC)
    return Holder(
        pid=os.getpid(),
        host=socket.gethostname(),
        started=started.isoformat(timespec="seconds"),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@cache
def _close_in_children() -> None:
    """A forked child shares its parent's locks until it closes them, and could outlive it."""

    def close() -> None:
        for descriptor in _descriptors:
            os.close(descriptor)
        _descriptors.clear()

    os.register_at_fork(after_in_child=close)
