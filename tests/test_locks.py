"""One process at a time: the other waits or hears who it is, and a dead one is in nobody's way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from cplus.base.locks import Held, beside, holder, holding
from cplus.probes.bank import open_journal

HOLD = "import sys, time\nfrom pathlib import Path\nfrom cplus.base.locks import holding\n"
HOLD += "with holding(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(float(sys.argv[2]))\n"


def start(lock: Path, seconds: float) -> subprocess.Popen[str]:
    """Another process that holds the lock when this returns."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock), str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(tmp_path / "out" / ".lock", 60)
    yield process
    process.kill()
    process.wait()


def test_the_second_process_hears_who_the_first_is_and_a_killed_one_is_in_nobodys_way(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    lock = tmp_path / "out" / ".lock"
    with pytest.raises(Held, match=f"out is in use by process {other.pid} on .*since 20"):
        holding(lock).__enter__()
    assert f"process {other.pid} " in holder(lock)
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert lock.exists()  # it is the kernel's lock that counts, not the file
    with holding(lock):
        assert f"process {os.getpid()} " in holder(lock)
    assert not lock.exists()


@pytest.mark.parametrize("opened", [holding, lambda path: open_journal(path, {})])
def test_a_link_is_refused_and_its_target_left_alone(
    tmp_path: Path, opened: Callable[[Path], AbstractContextManager[object]]
) -> None:
    (tmp_path / "mine").write_text("important")
    (tmp_path / "file").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match="file: expected a file of cplus, but it is a symbolic link; remove it"):
        opened(tmp_path / "file").__enter__()
    assert (tmp_path / "mine").read_text() == "important"


def test_a_short_wait_outlasts_a_short_holder(tmp_path: Path) -> None:
    lock, heard = tmp_path / ".lock", []
    process = start(lock, 0.3)
    with holding(lock, wait=30, notify=heard.append):
        pass
    process.wait()
    assert len(heard) == 1
    assert f"process {process.pid}" in heard[0]


def test_within_one_process_too(tmp_path: Path) -> None:
    lock = beside(tmp_path / "bank")
    with holding(lock):
        with pytest.raises(Held):
            holding(lock).__enter__()
        assert lock.exists()
    with holding(lock):
        pass


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    code = "import os, sys, time\nfrom pathlib import Path\nfrom cplus.base.locks import holding\n"
    code += "with holding(Path(sys.argv[1])):\n    pid = os.fork()\n    if not pid: time.sleep(30); os._exit(0)\n"
    code += "    print(pid, flush=True)\n    os.kill(os.getpid(), 9)\n"
    parent = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert parent.wait() == -signal.SIGKILL
    try:
        with holding(lock, wait=10):  # the child lets go as soon as it runs
            os.kill(child, 0)  # it still lives
    finally:
        os.kill(child, signal.SIGKILL)


def test_many_at_once_are_one_at_a_time(tmp_path: Path) -> None:
    code = HOLD.split("with ")[0] + (
        "folder = Path(sys.argv[1])\nfor _ in range(5):\n    with holding(folder / '.lock', wait=60):\n"
        "        value = int((folder / 'n').read_text())\n        time.sleep(0.01)\n"
        "        (folder / 'n').write_text(str(value + 1))\n"
    )
    (tmp_path / "n").write_text("0")
    with holding(tmp_path / ".lock"):  # all of them are there before the first begins
        crowd = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(4)]
        time.sleep(0.5)
    assert [process.wait() for process in crowd] == [0, 0, 0, 0]
    assert (tmp_path / "n").read_text() == "20"
