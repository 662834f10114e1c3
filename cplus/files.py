"""Files that are either whole or absent, and the hashes that identify their content."""

from __future__ import annotations

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
    """One text for one value: sorted keys, no blanks, no NaN.

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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place, synced, when the block ends without error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(descriptor)
    part = Path(name)
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.chmod(0o644)  # mkstemp makes files only their owner can read
        os.replace(part, path)
        _sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its place, synced, when the block ends without error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
    try:
        yield part
        part.chmod(0o755)  # mkdtemp makes folders only their owner can read
        for file in part.rglob("*"):
            if file.is_file():
                file.chmod(0o644)  # safetensors writes files only their owner can read
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        _swap(part, path)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _swap(part: Path, path: Path) -> None:
    if not path.exists():
        os.rename(part, path)
        return
    old = part.with_suffix(".old")
    os.rename(path, old)
    try:
        os.rename(part, path)
    except OSError:
        os.rename(old, path)
        raise
    shutil.rmtree(old)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value as readable JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a damaged one is named in the error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a JSON file, but it does not parse: {error}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
