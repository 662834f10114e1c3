"""Errors of a full disk under the cache, named with what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

_ADVICE = "free some space, or set CPLUS_CACHE to a folder on a larger disk"


def check(folder: Path, need: int, action: str) -> None:
    """Refuse an action that needs more bytes than the disk of `folder` has."""
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OSError(f"{action} needs {need / 1e9:.1f} GB in {folder}, but {free / 1e9:.1f} GB are free; {_ADVICE}")


@contextmanager
def named(folder: Path, action: str) -> Iterator[None]:
    """Say what to do if the disk of `folder` fills up during an action."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors reports the system's error as text.
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC}" in str(error)
        if not full:
            raise
        free = shutil.disk_usage(folder).free
        raise OSError(
            f"the disk of {folder} is full while {action} ({free / 1e9:.1f} GB are free); nothing was kept: {_ADVICE}"
        ) from error
