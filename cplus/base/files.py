"""Atomic writes of files and folders, and the hashes that identify their content."""

from __future__ import annotations

import ctypes
import errno
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> str:
    """The same text for the same value: sorted keys, no blanks, no NaN.

    >>> canonical_json({"b": 1, "a": [True, None]})
    '{"a":[true,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def fingerprint(value: Any) -> str:
    """The SHA-256 of a value's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """The folder of converted models, banks and compiled kernels: CPLUS_CACHE, or else ~/.cache/cplus."""
    return Path(os.environ.get("CPLUS_CACHE") or Path.home() / ".cache" / "cplus").expanduser()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path next to `path` that is synced and replaces it if the block ends without error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(descriptor)
    part = Path(name)
    try:
        yield part
        part.chmod(0o644)  # mkstemp creates files that only their owner can read
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """A temporary folder next to `path`, deleted when the block ends; `tidy` deletes what a killed process left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=path.parent, prefix=f".{path.name}.", suffix=".part", ignore_cleanup_errors=True
    ) as scratch:
        yield Path(scratch)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder next to `path` that is synced and replaces it if the block ends without error."""
    with scratch_folder(path) as part:
        yield part
        part.chmod(0o755)  # only its owner can read a temporary folder
        for file in part.rglob("*"):
            if file.is_file():
                file.chmod(0o644)  # safetensors writes files that only their owner can read
            sync(file)
        sync(part)
        if not path.exists():
            os.rename(part, path)
        elif not exchange(part, path):  # else the old one is at `part` now
            # Two moves with a moment without `path` between them; `tidy` undoes the first if the second never happened.
            old = part.with_suffix(".old")
            os.rename(path, old)
            try:
                os.rename(part, path)
            except OSError:
                os.rename(old, path)
                raise
            shutil.rmtree(old)
        sync(path.parent)


def exchange(left: Path, right: Path) -> bool:
    """Swap two paths atomically; False if the operating or file system does not support it."""
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of Linux
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    return bool(renameat2(here, os.fsencode(left), here, os.fsencode(right), swap) == 0)


def tidy(folder: Path, name: str | None = None) -> None:
    """Clean up what killed processes left half-written, for this name or all; no other process may be writing there."""
    which = "*" if name is None else f"{glob.escape(name)}.*"
    for old in folder.glob(f".{which}.old"):
        path = folder / old.name[1:].rpartition(".")[0].rpartition(".")[0]  # .NAME.RANDOM.old
        if not path.exists():
            os.rename(old, path)
    for left in (*folder.glob(f".{which}.part"), *folder.glob(f".{which}.old")):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def write_state(path: Path, state: object) -> None:
    """Write tensors and plain values for torch's `weights_only` loading; a full disk raises its own OSError."""
    import torch

    with replacing(path) as part, part.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch's writer checks its position while handling the disk's error and so hides that error.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def is_left(name: str) -> bool:
    """Whether only a killed process leaves a file of this name: a lock, or something half-written.

    >>> is_left(".record.json.k3_x.part"), is_left(".lock"), is_left("record.json")
    (True, True, False)
    """
    return name.startswith(".") and name.endswith((".lock", ".part", ".old"))


def open_itself(path: Path | str, flags: int) -> int:
    """The descriptor of a file; a symbolic link is refused, because what it points to would be overwritten."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"{path}: expected a file of cplus, but it is a symbolic link; remove it") from error


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def sealed(body: dict[str, Any]) -> dict[str, Any]:
    """The values as they will be read back, plus their hash under `sha256`."""
    plain: dict[str, Any] = json.loads(canonical_json(body))
    return {**plain, "sha256": fingerprint(plain)}


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a record made by `sealed`; one that was altered since is refused."""
    raw = read_json(path)
    check_seal(path, raw)
    return dict(raw)


def check_seal(path: Path | str, raw: Any) -> None:
    """Refuse a record whose content does not match its hash."""
    if not isinstance(raw, dict) or "sha256" not in raw:
        raise ValueError(f"{path}: expected a record with its hash, got none; it was written by another version")
    if raw["sha256"] != fingerprint({key: value for key, value in raw.items() if key != "sha256"}):
        raise ValueError(f"{path}: the record was altered after it was written: its content does not match its hash")


def read_json(path: Path) -> Any:
    """Read a JSON file; the error for a damaged file names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, a number of too many digits
        raise ValueError(f"{path}: expected a JSON file, but it does not parse: {error}") from error
