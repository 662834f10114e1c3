"""The ledger's file: what each stage holds, hash by hash, and which stage it followed. No torch here."""

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
    """One whole stage; `before` and `after` are the models' fingerprints, `previous` the seal of the entry before."""

    stage: int
    task: str
    before: str
    after: str
    files: dict[str, str]
    created: str
    previous: str | None

    @property
    def seal(self) -> str:
        """The hash of everything the entry says."""
        return files.fingerprint(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The stages so far, in order; `head` is the seal that the file gives for the last of them."""

    root: Path
    entries: tuple[Entry, ...] = ()
    head: str | None = None

    def place(self, stage: int) -> Stage:
        """The folder of a stage, there or not."""
        return Stage(self.root / "stages" / f"{stage:03d}")

    @property
    def next(self) -> Stage:
        """The folder of the stage that is not in the ledger yet."""
        return self.place(len(self.entries) + 1)


@dataclass(frozen=True)
class Stage:
    """The paths of one stage."""

    root: Path

    @property
    def asked(self) -> Path:
        """What the update was asked, so that an unfinished one is only gone on with by the same command."""
        return self.root / "asked.json"

    @property
    def new(self) -> Path:
        """The rows learned."""
        return self.root / "new.jsonl"

    @property
    def past(self) -> Path:
        """First stage: the held-out rows on which the base model is watched."""
        return self.root / "past.jsonl"

    @property
    def anchors(self) -> Path:
        """The rows that stand for the task before this one, or for the base model."""
        return self.root / "anchors.jsonl"

    @property
    def watched(self) -> Path:
        """The learned rows that later stages ask again: all, or of much free text those asked here."""
        return self.root / "watched.jsonl"

    @property
    def base(self) -> Path:
        """First stage: the rows on which later stages ask what the base model could do."""
        return self.root / "base.jsonl"

    @property
    def flips(self) -> Path:
        """Every row asked, by set: kept, lost, gained or still wrong."""
        return self.root / "flips.json"

    @property
    def job(self) -> Path:
        """What `cplus adapt` wrote: model, bank, anchors, record, receipt."""
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
    """Whether a ledger lies there."""
    return (root / NAME).is_file()


def read(root: Path) -> Ledger:
    """Read a ledger as it stands; `problems` says whether it can be believed."""
    if not exists(root):
        raise ValueError(f"{root}: expected a ledger with {NAME}; 'cplus update {root} --model ...' begins one")
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
    """Seal the next stage's folder into the ledger; its file is the old one or the new one at every instant."""
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
    """Every file of a stage by its name in the folder, in order; locks are nobody's content."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != ".lock":
            yield path.relative_to(folder).as_posix(), path


def problems(ledger: Ledger, *, models: bool = True) -> list[str]:
    """Everything that is not as it was sealed, a sentence each; without `models` only the last stage's is read."""
    found = list(_chain(ledger))
    for entry in ledger.entries:
        whole = models or entry is ledger.entries[-1]
        found += _files(ledger.place(entry.stage).root, entry, whole=whole)
    return found


def _chain(ledger: Ledger) -> Iterator[str]:
    before: Entry | None = None
    for number, entry in enumerate(ledger.entries, start=1):
        if entry.stage != number:
            yield f"entry {number} calls itself stage {entry.stage}: an entry was removed or moved"
        if entry.previous != (before.seal if before else None):
            yield f"stage {number} was sealed after another entry than the one before it: an entry was changed"
        if before is not None and entry.before != before.after:
            yield f"stage {number} began from another model than stage {number - 1} ended with"
        before = entry
    if ledger.head != (before.seal if before else None):
        yield "the last entry is not the one that was sealed"


def _files(folder: Path, entry: Entry, *, whole: bool) -> Iterator[str]:
    there = dict(contents(folder))
    for name, sealed in entry.files.items():
        if name not in there:
            yield f"stage {entry.stage}: {name} is missing"
        elif (whole or not name.startswith("job/model/")) and files.sha256_file(there[name]) != sealed:
            yield f"stage {entry.stage}: {name} was changed"
    for name in sorted(set(there) - set(entry.files)):
        yield f"stage {entry.stage}: {name} was added"


def restore(ledger: Ledger, stage: int, out: Path) -> Path:
    """Copy a stage's model to a new folder, if it still is the one that was sealed."""
    if not 1 <= stage <= len(ledger.entries):
        raise ValueError(f"{ledger.root}: expected a stage from 1 to {len(ledger.entries)}, got {stage}")
    if out.exists():
        raise ValueError(f"{out}: exists, so nothing is written there; choose another folder")
    entry, place = ledger.entries[stage - 1], ledger.place(stage)
    wrong = [*_chain(ledger), *_files(place.root, entry, whole=True)]
    if wrong:
        raise ValueError(f"{ledger.root}: {wrong[0]}; 'cplus ledger verify' tells everything that is wrong")
    with files.replacing_folder(out) as part:
        shutil.copytree(place.model, part, dirs_exist_ok=True)
    return out
