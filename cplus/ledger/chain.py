"""The ledger file: the hash of every file of each stage, and the stage it followed. It does not import torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from cplus import files

FORMAT = "cplus-ledger/1"
NAME = "ledger.json"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One complete stage; `before` and `after` are model fingerprints, `previous` is the seal of the previous entry."""

    stage: int
    task: str
    before: str
    after: str
    files: dict[str, str]
    created: str
    previous: str | None

    @property
    def seal(self) -> str:
        """The hash of the entry's content."""
        return files.fingerprint(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The stages so far, in order; `head` is the seal of the last one according to the file."""

    root: Path
    entries: tuple[Entry, ...] = ()
    head: str | None = None

    def place(self, stage: int) -> StageFolder:
        """The folder of a stage, which need not exist."""
        return StageFolder(self.root / "stages" / f"{stage:03d}")

    @property
    def next(self) -> StageFolder:
        """The folder of the next stage, which is not in the ledger yet."""
        return self.place(len(self.entries) + 1)


@dataclass(frozen=True)
class StageFolder:
    """The paths of one stage."""

    root: Path

    @property
    def arguments(self) -> Path:
        """The update's arguments; resuming requires the same ones."""
        return self.root / "asked.json"

    @property
    def new(self) -> Path:
        """The rows learned."""
        return self.root / "new.jsonl"

    @property
    def past(self) -> Path:
        """First stage: the held-out rows on which the base model is evaluated."""
        return self.root / "past.jsonl"

    @property
    def anchors(self) -> Path:
        """The anchors of the previous task, or of the base model."""
        return self.root / "anchors.jsonl"

    @property
    def watched(self) -> Path:
        """The learned rows that later stages evaluate again: those that this stage evaluated."""
        return self.root / "watched.jsonl"

    @property
    def base(self) -> Path:
        """First stage: the rows on which later stages evaluate what the base model could do."""
        return self.root / "base.jsonl"

    @property
    def flips(self) -> Path:
        """Every evaluated row, by set: kept, lost, gained or still wrong."""
        return self.root / "flips.json"

    @property
    def job(self) -> Path:
        """The output of `cplus adapt`: model, bank, anchors, record, receipt."""
        return self.root / "job"

    @property
    def model(self) -> Path:
        """The model after the stage."""
        return self.job / "model"

    @property
    def record(self) -> Path:
        """The job's figures."""
        return self.job / "record.json"


def exists(root: Path) -> bool:
    """Whether the folder contains a ledger."""
    return (root / NAME).is_file()


def read(root: Path) -> Ledger:
    """Read a ledger without verifying it; `problems` does that."""
    if not exists(root):
        raise ValueError(f"{root}: expected a ledger with {NAME}; start one with 'cplus update {root} --model ...'")
    raw = files.read_json(root / NAME)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError(f"{root / NAME}: expected the format {FORMAT}; it was written by another version")
    try:
        entries = tuple(Entry(**entry) for entry in raw["stages"])
        return Ledger(root=root, entries=entries, head=raw["head"])
    except (KeyError, TypeError) as error:
        names = ", ".join(f.name for f in fields(Entry))
        raise ValueError(f"{root / NAME}: expected head and stages with {names}; {error}") from error


def append(ledger: Ledger, *, task: str, before: str, after: str, created: str) -> Ledger:
    """Seal the next stage's folder into the ledger; the ledger file is replaced atomically."""
    entry = Entry(
        stage=len(ledger.entries) + 1,
        task=task,
        before=before,
        after=after,
        files={name: files.sha256_file(path) for name, path in contents(ledger.next.root)},
        created=created,
        previous=ledger.entries[-1].seal if ledger.entries else None,
    )
    grown = replace(ledger, entries=(*ledger.entries, entry), head=entry.seal)
    body: dict[str, Any] = {"format": FORMAT, "stages": [asdict(e) for e in grown.entries], "head": grown.head}
    files.write_json(ledger.root / NAME, body)
    return grown


def contents(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file of a stage with its relative path, sorted; lock files do not count."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != ".lock":
            yield path.relative_to(folder).as_posix(), path


def problems(ledger: Ledger, *, models: bool = True) -> list[str]:
    """Every deviation from the seals, one sentence each; without `models` only the last stage's model is checked."""
    found = list(_chain(ledger))
    for entry in ledger.entries:
        whole = models or entry is ledger.entries[-1]
        found += _files(ledger.place(entry.stage).root, entry, whole=whole)
    return found


def _chain(ledger: Ledger) -> Iterator[str]:
    before: Entry | None = None
    for number, entry in enumerate(ledger.entries, start=1):
        if entry.stage != number:
            yield f"entry {number} is marked as stage {entry.stage}: an entry was removed or moved"
        if entry.previous != (before.seal if before else None):
            yield f"stage {number} does not follow the entry that it was sealed after: an entry was changed"
        if before is not None and entry.before != before.after:
            yield f"stage {number} started from a model other than the one stage {number - 1} ended with"
        before = entry
    if ledger.head != (before.seal if before else None):
        yield "the last entry is not the one that was sealed"


def _files(folder: Path, entry: Entry, *, whole: bool) -> Iterator[str]:
    present = dict(contents(folder))
    for name, sealed in entry.files.items():
        if name not in present:
            yield f"stage {entry.stage}: {name} is missing"
        elif (whole or not name.startswith("job/model/")) and files.sha256_file(present[name]) != sealed:
            yield f"stage {entry.stage}: {name} was changed"
    for name in sorted(set(present) - set(entry.files)):
        yield f"stage {entry.stage}: {name} was added"


def restore(ledger: Ledger, stage: int, out: Path) -> Path:
    """Copy a stage's model to a new folder, if it is still the sealed one."""
    if not 1 <= stage <= len(ledger.entries):
        raise ValueError(f"{ledger.root}: expected a stage from 1 to {len(ledger.entries)}, got {stage}")
    if out.exists():
        raise ValueError(f"{out} already exists and is not overwritten; choose another folder")
    entry, place = ledger.entries[stage - 1], ledger.place(stage)
    wrong = [*_chain(ledger), *_files(place.root, entry, whole=True)]
    if wrong:
        raise ValueError(f"{ledger.root}: {wrong[0]}; 'cplus ledger verify' lists all problems")
    with files.replacing_folder(out) as part:
        shutil.copytree(place.model, part, dirs_exist_ok=True)
    return out
