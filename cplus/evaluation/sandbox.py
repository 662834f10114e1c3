"""Code that a model wrote, run apart: without network, with no files but Python's own, within limits."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SECONDS = 5
"""Of the processor and of the clock, for one answer."""
BYTES = 512 << 20
_SAID = 1 << 16
"""Bytes that a program may print or write to a file."""
_INSIDE = """
import json, sys
given, names = json.load(sys.stdin), {"__name__": "answer"}
exec(given["code"], names)
values = [repr(eval(call, names)) for call in given["calls"]]
print(flush=True)
print(json.dumps(values), flush=True)
"""
_LEAVE = """
import ctypes, os, sys
assert ctypes.CDLL(None, use_errno=True).umount2(b"/old", 2) == 0, os.strerror(ctypes.get_errno())
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Let go of the whole file system; umount(8) would look for /proc, which is not there any more."""
_NAMESPACES = ("--user", "--map-root-user", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child")


def values(code: str, calls: Sequence[str]) -> list[str] | None:
    """What the calls give after the code, each as Python writes it; None where the program fails or takes too long.

    It runs in namespaces of its own: of the file system it sees Python and the system's libraries, which it cannot
    change, and an empty folder in memory; it sees no network, no other process and no environment.
    """
    if (problem := why_not()) is not None:
        raise ValueError(problem)
    return _run(code, calls)[0]


@cache
def why_not() -> str | None:
    """Why code cannot be run on this machine, in one sentence; None where it can."""
    try:
        found, said = _run("", ["1 + 1"])
    except FileNotFoundError as error:
        found, said = None, str(error)
    if found == ["2"]:
        return None
    return (
        "expected a machine that offers namespaces to its users (Linux, with unshare of util-linux), so that code from "
        f"a model can be run, but got {' '.join(said.split()) or 'no answer'!r:.200}; leave out --run-code"
    )


def _run(code: str, calls: Sequence[str]) -> tuple[list[str] | None, str]:
    with tempfile.TemporaryDirectory(prefix="cplus-run-") as folder:
        place, said, errors = Path(folder), Path(folder, "said"), Path(folder, "errors")
        command = [
            "prlimit", f"--as={BYTES}", f"--cpu={SECONDS}", f"--fsize={_SAID}", "--nproc=64", "--core=0",
            "unshare", *_NAMESPACES, "sh", "-ec", _entered(place),
        ]  # fmt: skip
        try:
            with said.open("wb") as out, errors.open("wb") as err:  # files, which a limit holds for
                done = subprocess.run(
                    command,
                    input=json.dumps({"code": code, "calls": list(calls)}).encode(),
                    stdout=out,
                    stderr=err,
                    timeout=SECONDS,
                    env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                )
        except subprocess.TimeoutExpired:
            return None, "no end"
        lines, why = said.read_text(errors="replace").splitlines(), errors.read_text(errors="replace")
    try:
        found = json.loads(lines[-1]) if done.returncode == 0 and lines else None
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, list) else None, why[-500:]


def _entered(root: Path) -> str:
    """The commands that make the folder the root of a small file system and start Python in it."""
    python = Path(sys.base_prefix).resolve()
    steps = [f"mount -t tmpfs -o size=16m,mode=755 none {root}", f"cd {root}", "mkdir -p old work"]
    for place in (*map(Path, ("/usr", "/lib", "/lib64", "/bin", "/sbin")), python):
        if place.is_symlink():
            steps.append(f"ln -s {place.readlink()} .{place}")
        elif place.is_dir() and (place == Path("/usr") or not place.is_relative_to("/usr")):
            own = shlex.quote(str(place))
            steps += [f"mkdir -p .{own}", f"mount --bind {own} .{own}", f"mount -o remount,bind,ro .{own}"]
    started = [f"{python}/bin/python{sys.version_info.major}.{sys.version_info.minor}", "-IBc"]
    bare = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    last = shlex.join([*started, _LEAVE, *bare, *started, _INSIDE])
    return "\n".join([*steps, "pivot_root . old", "cd /work", f"exec {last}"])
