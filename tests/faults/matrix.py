"""One command under one fault: what ended how, whether anything was lost, and whether the end is the same bits."""

from __future__ import annotations

import ctypes
import io
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cplus.cli import app
from faults.commands import Command

Act = Callable[[], None]
PATIENCE = 120  # seconds for one process
FILLER = "filler"
DAY = 86_400


# What is done to a process at one of its durable operations: a sync or a rename, counted from its start.


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


# What survives it.


@dataclass(frozen=True)
class Fault:
    """`act` comes at a drawn operation of a process; `heal` makes good what a person would; `ends` are due exits."""

    name: str
    act: Callable[[Path], None]
    ends: frozenset[int]
    heal: Callable[[Path], None] = lambda folder: None
    says: tuple[str, ...] = ()
    """One of these stands in the error, where the process can still speak."""


@dataclass(kw_only=True)
class Cell:
    """One field of the table."""

    command: str
    fault: str
    ends: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    lost: bool = False
    bitwise: bool = False
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Survived, nothing lost, the same bits."""
        return not self.problems and not self.lost and self.bitwise


def _kill(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # what no program can catch


def _terminate(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGTERM)  # what a cluster sends before it kills


_KILLED, _REFUSED = frozenset({-signal.SIGKILL}), frozenset({1})
_FULL = ("No space left", "File too large", "I/O error")
_LOCKED = ("Permission denied", "Read-only", "cannot be opened")
FAULTS = (
    Fault("kill -9", _kill, _KILLED),
    Fault("SIGTERM", _terminate, frozenset({143, -signal.SIGTERM})),
    Fault("disk full", fill, _REFUSED, empty, _FULL),
    Fault("read-only folder", lock_up, _REFUSED, unlock, _LOCKED),
    Fault("truncated file", _kill, _KILLED),
    Fault("clock back", _kill, _KILLED, from_the_future),
)


def run(command: Command, folder: Path, arm: Callable[[], None]) -> tuple[int, str]:
    """The command in a process of its own, armed by the fault: how it ended, and what it said."""
    said = folder.parent / f"{folder.name}.stderr"
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _child(command, folder, arm, said)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.read_text(errors="replace")


def _child(command: Command, folder: Path, arm: Callable[[], None], said: Path) -> None:
    code = 70
    try:
        signal.alarm(PATIENCE)
        with said.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        arm()
        code = _performed(command, folder)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


def reference(command: Command, folder: Path) -> Any:
    """The command undisturbed."""
    folder.mkdir(parents=True)
    command.prepare(folder)
    # In this process, so that those forked from it need import nothing.
    where, environment = Path.cwd(), os.environ.copy()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        code = _performed(command, folder)
    os.chdir(where)
    os.environ["CPLUS_CACHE"] = environment.get("CPLUS_CACHE", "")
    assert code == 0, f"{command.name} undisturbed ended with {code}"
    return command.digest(folder)


def _performed(command: Command, folder: Path) -> int:
    """Do the command here: its exit code."""
    os.environ["CPLUS_CACHE"] = str(folder / "cache")
    os.chdir(folder)
    sys.argv = ["cplus", *command.argv(folder)]
    try:
        app.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def tried(command: Command, fault: Fault, folder: Path, expected: Any, *, seed: str, times: int) -> Cell:
    """The fault so many times, each at another moment, then undisturbed to the end."""
    cell, draw, begun = Cell(command=command.name, fault=fault.name), random.Random(seed), time.monotonic()
    with ExitStack() as stack:
        if fault.name == "disk full":
            stack.enter_context(small_disk(folder))
        folder.mkdir(parents=True, exist_ok=True)
        command.prepare(folder)
        for code, said in _attempts(command, fault, folder, draw, cell, times):
            cell.ends.append(code)
            if "Traceback" in said:
                cell.problems.append("a traceback: " + said.strip().splitlines()[-1])
            if code == 0:
                break
        else:
            cell.problems.append(f"never finished: {said.strip()[-300:]}")
        if not cell.problems:
            cell.bitwise = command.digest(folder) == expected
            # A dead process's lock may stay where nobody works again: it is the kernel's lock that counts.
            left = [p.name for p in folder.rglob(".*") if p.suffix in (".part", ".old")]
            cell.problems += [f"left behind: {', '.join(left)}"] if left else []
    cell.seconds = time.monotonic() - begun
    shutil.rmtree(folder, ignore_errors=True)
    return cell


def _attempts(
    command: Command, fault: Fault, folder: Path, draw: random.Random, cell: Cell, times: int
) -> Iterator[tuple[int, str]]:
    """Armed ones, each judged after the healing, then those that must go through."""
    for _ in range(times):
        nth, before = draw.randint(1, command.operations), command.accepted(folder)

        def arm(nth: int = nth) -> None:
            if fault.name == "clock back":
                clock_back()
            at_operation(nth, lambda: fault.act(folder))

        code, said = run(command, folder, arm)
        fault.heal(folder)
        _judge(command, fault, folder, cell, code, said, before)
        yield code, said
        if fault.name == "truncated file" and (states := command.states(folder)):
            yield from _cut_short(command, folder, cell, *draw.choice(states))
    for _ in range(2):
        yield run(command, folder, lambda: None)


def _judge(command: Command, fault: Fault, folder: Path, cell: Cell, code: int, said: str, before: float) -> None:
    if code not in fault.ends | {0}:
        cell.problems.append(f"ended with {code}: {said.strip()[-300:]}")
    if code == 1 and fault.says and not any(words in said for words in fault.says):
        cell.problems.append(f"did not say why: {said.strip()[-300:]}")
    try:
        command.check(folder)
    except (ValueError, AssertionError, OSError) as error:
        cell.problems.append(f"looks whole and is not: {error}")
    cell.lost |= command.accepted(folder) < before


def _cut_short(command: Command, folder: Path, cell: Cell, path: Path, remove: Path) -> Iterator[tuple[int, str]]:
    """A file that lost its second half is refused by its name, or only its last whole entry counts."""
    os.truncate(path, path.stat().st_size // 2)
    code, said = run(command, folder, lambda: None)
    yield code, said
    if code == 0:
        return
    if code != 1 or str(remove) not in said:
        cell.problems.append(f"a cut {path.name} gave {code}: {said.strip()[-300:]}")
    shutil.rmtree(remove) if remove.is_dir() else remove.unlink()


def matrix(
    commands: Sequence[Command], faults: Sequence[Fault], place: Path, *, seed: int, times: int
) -> Iterator[Cell]:
    """Every command under every fault, one after the other."""
    torch.set_num_threads(1)
    for command in commands:
        expected = reference(command, place / command.name / "whole")
        for fault in faults:
            folder = place / command.name / fault.name.replace(" ", "-")
            yield tried(command, fault, folder, expected, seed=f"{seed}/{command.name}/{fault.name}", times=times)
