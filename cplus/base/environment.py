"""What could change a number besides the settings: versions, machine, threads, commit; and its free memory."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.version import Version

OLDEST = {"torch": "2.8", "transformers": "5.4", "accelerate": "1.11", "peft": "0.18", "trl": "0.24"}
"""The oldest versions of what the gate meets, as in pyproject.toml and in the matrix of environments."""
_CGROUP = Path("/sys/fs/cgroup")


def environment(*, threads: int, device: str) -> dict[str, Any]:
    """The environment as records hold it."""
    return {
        "versions": versions(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": threads,
        "device": device,
        "commit": _commit(),
    }


def versions() -> dict[str, str | None]:
    """The versions of the packages that decide numbers."""
    return {name: installed(name) for name in ("cplus", "torch", "transformers", "tokenizers", "numpy")}


def check_versions() -> None:
    """Refuse a loaded package that is too old, before it fails in the middle of a training run."""
    for name, oldest in OLDEST.items():
        found = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(found, str) and Version(found).release < Version(oldest).release:
            raise ImportError(f"cplus needs {name} {oldest} or newer, found {found}; pip install '{name}>={oldest}'")


def free_memory() -> int:
    """Free bytes of memory; in a container no more than its limit."""
    import psutil  # type: ignore[import-untyped]

    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, int(limit) - used)


def give_back() -> None:
    """Return freed memory to the system; the C library of Linux keeps blocks of some megabytes otherwise."""
    gc.collect()
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def give_back_at_once() -> None:
    """From now on blocks of a megabyte go back to the system when they are freed; otherwise the C library keeps them.

    Shards are gathered and freed block by block, which leaves gaps of many sizes. The price is more page faults.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            library.mallopt(option, 1 << 20)


def installed(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of a source checkout, None for an installed package."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


# User modules named on the command line or in settings.


def user_module(name: str) -> ModuleType:
    """Import a module by its name; the current folder is searched too, as with `python -m`.

    >>> user_module("json").__name__
    'json'
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)
