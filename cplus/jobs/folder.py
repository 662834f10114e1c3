"""A job's folder: its paths, its lock, what may be replaced, and other finished jobs."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cplus.base import files, locks
from cplus.data.examples import fingerprint
from cplus.distributed import processes
from cplus.jobs.settings import AdaptConfig, RepairConfig, check_repeated, settings
from cplus.receipts.page import current
from cplus.receipts.verdict import headline, of_figures
from cplus.training.rows import Group

FORMAT = "cplus-job/1"
_LOOKS, _PAUSE = 50, 0.2  # a shared file system may show a new file seconds later
_OURS = (
    "settings.json", "work", "beside", "model", "bank", "anchors.jsonl", "past.jsonl", "record.json", "receipt.json",
    "receipt.html", "README.md", "tensorboard",
)  # fmt: skip


class Folder:
    """The paths of one job."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings = root / "settings.json"  # marks the folder as a job's
        self.bank = root / "bank"
        self.anchors = root / "anchors.jsonl"  # for later jobs that protect them too
        self.past = root / "past.jsonl"  # held-out rows that the base model wrote itself
        self.model = root / "model"
        self.card = root / "README.md"
        self.record = root / "record.json"  # written last: marks the job as finished
        self.work = root / "work"  # what only an unfinished job needs
        self.home = self.work / "home.json"  # the folder that relative paths refer to
        self.answers = self.work / "before.json"
        self.seconds = self.work / "seconds.json"
        self.checkpoint = self.work / "checkpoint.pt"  # one file is replaced in one move, a folder is not
        self.best = self.work / "best.pt"
        self.good = self.work / "good.pt"
        self.beside = root / "beside"  # what only an unfinished comparison of a finished job needs

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a last state, in one file or in shards."""
        return self.checkpoint.is_file() or self.checkpoint.with_suffix(".json").is_file()

    def clear_work(self) -> None:
        """Remove what only an unfinished job needs."""
        shutil.rmtree(self.work, ignore_errors=True)


@contextmanager
def claimed(folder: Folder) -> Iterator[None]:
    """Hold the folder for this job alone; what a killed process left half-written is removed."""
    if not processes.first():
        yield
        return
    with locks.holding(folder.root / ".lock", otherwise="wait for it or choose another out"):
        for parent in (folder.root, folder.work):
            files.tidy(parent)
        yield


def check_free(folder: Folder, *, force: bool) -> None:
    """Refuse a folder that holds something, unless it is a job's and may be replaced."""
    if not folder.root.exists():
        return
    if not folder.root.is_dir():
        raise ValueError(f"{folder.root}: expected a folder to write into, but it is a file; choose another out")
    if all(files.is_left(entry.name) for entry in folder.root.iterdir()):
        return
    if not folder.settings.is_file():
        raise ValueError(
            f"{folder.root}: exists and is not a job's folder, so nothing in it is replaced; choose another out"
        )
    if not force:
        state = "a finished job" if folder.record.is_file() else f"an unfinished job: --resume {folder.root}"
        raise ValueError(f"{folder.root}: holds {state}; choose another out, or --force to replace it")


def check_seen(folder: Folder) -> None:
    """Refuse a folder that some process of the job does not see."""
    for _ in range(_LOOKS):
        if found := folder.settings.is_file():
            break
        time.sleep(_PAUSE)
    for process, (sees, host) in enumerate(processes.gathered((found, socket.gethostname()))):
        if not sees:
            processes.refuse(
                f"{folder.root}: process {process} on {host} does not see this folder; choose an out that all nodes "
                "share"
            )


def begin_folder(
    folder: Folder, config: AdaptConfig, home: Path, format: str = FORMAT, chosen: Sequence[Any] = ()
) -> None:
    """Remove what an earlier job wrote, nothing else, and write this job's settings."""
    _clear(folder)
    rewrite(folder, config, format, chosen)
    files.write_json(folder.home, str(home.absolute()))


def discard(folder: Folder) -> None:
    """Remove everything that a job wrote, and the folder itself if nothing else is in it."""
    _clear(folder)
    if all(files.is_left(entry.name) for entry in folder.root.iterdir()):
        shutil.rmtree(folder.root)


def _clear(folder: Folder) -> None:
    # settings.json is removed last: after a kill in between, --force may still replace the folder.
    for name in reversed(_OURS):
        path = folder.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def rewrite(folder: Folder, config: AdaptConfig, format: str = FORMAT, chosen: Sequence[Any] = ()) -> None:
    """Replace the settings of a job that has begun, and why it has those that were not given, in one file."""
    body = {"format": format, "settings": config.model_dump(mode="json"), "chosen": [asdict(own) for own in chosen]}
    files.write_json(folder.settings, body)


def read_settings(folder: Folder, repeated: Mapping[str, Any]) -> tuple[AdaptConfig, Path]:
    """The settings of a begun job, and the folder that its relative paths refer to."""
    values, home = read_values(folder, FORMAT, repeated)
    return settings(values, where=str(folder.settings)), home


def read_values(folder: Folder, format: str, repeated: Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """The settings of a begun job of this format, unchecked, and the folder that its relative paths refer to."""
    if not folder.settings.is_file():
        raise ValueError(f"{folder.root}: there is no job to resume; expected the {folder.settings.name} of one")
    raw = files.read_json(folder.settings)
    if not isinstance(raw, dict) or raw.get("format") != format or not isinstance(raw.get("settings"), dict):
        found = raw.get("format") if isinstance(raw, dict) else None
        raise ValueError(
            f"{folder.settings}: expected the format {format}, got {found!r:.40}; it was written by another command "
            "or version"
        )
    check_repeated(raw["settings"], repeated, folder.settings)
    # The folder may have been moved since; settings of earlier versions that were not used are no fault.
    gone = [name for name, value in raw["settings"].items() if name not in RepairConfig.model_fields and not value]
    values = {**{name: value for name, value in raw["settings"].items() if name not in gone}, "out": folder.root}
    return values, Path(files.read_json(folder.home)) if folder.home.is_file() else Path.cwd()


# A finished job.


def row_hashes(groups: Sequence[Group]) -> dict[str, str]:
    """Hashes of the rows evaluated, by their part."""
    return {group.part: fingerprint(group.examples) for group in groups if group.part != "external"}


def read_finished(folder: Folder) -> dict[str, Any]:
    """The record of a finished job, with the figures of this version."""
    return current(files.read_sealed(folder.record))


@dataclass(frozen=True, kw_only=True)
class FinishedJob:
    """The folder of a finished job and its record."""

    folder: Path
    record: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"FinishedJob({str(self.folder)!r}: {headline(self.record['figures'])})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict, each set of rows before and after, and the receipt's path."""
        links = {"receipt": str(self.folder / "receipt.html"), "model": str(self.folder / "model")}
        return of_figures(headline(self.record["figures"]), self.record["figures"], links)

    @property
    def kept(self) -> bool:
        """Whether every requirement is met."""
        return all(requirement["met"] for requirement in self.record["figures"]["requirements"])
