"""The sealed bank, and the journal from which an interrupted one is resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cplus.base import files, locks
from cplus.data.examples import Example, to_row
from cplus.data.formats import from_row

# The sealed bank: probes, and a manifest that identifies their origin and detects any change.


FORMAT = "cplus-bank/1"
PROBES, MANIFEST = "probes.jsonl", "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A generated input with the frozen model's own answer, and its origin.

    Paper: the pair (x_j, y_j) of the bank S_A, App. C.1.
    """

    example: Example
    confidence: float
    request: int
    shots: tuple[str, ...]
    topic: str | None


@dataclass(frozen=True, kw_only=True)
class Bank:
    """Probes sealed for one model and one set of anchors."""

    probes: tuple[Probe, ...]
    manifest: Mapping[str, Any]

    @property
    def examples(self) -> tuple[Example, ...]:
        """The probes as examples of the task."""
        return tuple(probe.example for probe in self.probes)

    @staticmethod
    def load(
        path: Path | str, *, model_fingerprint: str | None = None, anchors: Sequence[Example] | None = None
    ) -> Bank:
        """Read a bank; refuse one that was edited, or that was sealed for another model or other anchors."""
        folder = Path(path)
        if not (folder / MANIFEST).is_file() or not (folder / PROBES).is_file():
            raise ValueError(
                f"{folder}: expected a sealed bank with {MANIFEST} and {PROBES}; build one with 'cplus probe'"
            )
        manifest = files.read_json(folder / MANIFEST)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ValueError(f"{folder}: expected the format {FORMAT}; rebuild the bank with 'cplus probe'")
        if manifest.pop("seal", None) != files.fingerprint(manifest):
            raise ValueError(
                f"{folder / MANIFEST} was changed after the bank was sealed; rebuild it with 'cplus probe'"
            )
        model, known = manifest["model"], manifest["anchors"]
        if model_fingerprint not in (None, model["fingerprint"]):
            raise ValueError(
                f"probe bank {folder} was sealed for {model['name']}@{model['fingerprint'][:7]} "
                f"but the base model is @{model_fingerprint[:7]}; rebuild it with 'cplus probe'"
            )
        if anchors is not None and (given := anchors_hash(anchors)) != known["sha256"]:
            raise ValueError(
                f"probe bank {folder} was sealed for {known['count']} anchors @{known['sha256'][:7]} "
                f"but these {len(anchors)} are @{given[:7]}; rebuild it with 'cplus probe' or use its own anchors"
            )
        if files.sha256_file(folder / PROBES) != manifest["probes_sha256"]:
            raise ValueError(f"{folder / PROBES} was changed after the bank was sealed; rebuild it with 'cplus probe'")
        with (folder / PROBES).open(encoding="utf-8") as lines:
            probes = tuple(probe_from_row(json.loads(line)) for line in lines)
        return Bank(manifest=manifest, probes=probes)


def seal(folder: Path, probes: Sequence[Probe], manifest: Mapping[str, Any]) -> Bank:
    """Write a bank atomically: the folder appears once all of its content is on disk."""
    if folder.exists():
        raise ValueError(f"{folder} already exists; remove it or choose another folder for the bank")
    with files.replacing_folder(folder) as part:
        lines = (files.canonical_json(probe_to_row(probe)) + "\n" for probe in probes)
        files.write_text(part / PROBES, "".join(lines))
        body = {**manifest, "format": FORMAT, "probes_sha256": files.sha256_file(part / PROBES)}
        files.write_json(part / MANIFEST, {**body, "seal": files.fingerprint(body)})
    return Bank.load(folder)


def probe_to_row(probe: Probe) -> dict[str, Any]:
    """The JSON row of a probe; all rows of a bank have the same keys, so that they fit a table."""
    origin = {"confidence": probe.confidence, "request": probe.request, "topic": probe.topic}
    return {**to_row(probe.example), **origin, "shots": list(probe.shots)}


def probe_from_row(row: Mapping[str, Any]) -> Probe:
    """Read a row written by `probe_to_row`."""
    origin = {"confidence": row["confidence"], "request": row["request"], "topic": row["topic"]}
    return Probe(example=from_row(row, where=f"probe {row['request']}", id=""), shots=tuple(row["shots"]), **origin)


def described(anchors: Sequence[Example]) -> dict[str, Any]:
    """The anchors as a manifest names them."""
    return {"count": len(anchors), "sha256": anchors_hash(anchors), "ids": [anchor.id for anchor in anchors]}


def anchors_hash(anchors: Sequence[Example]) -> str:
    """The SHA-256 of a set of anchors, independent of their order."""
    return files.fingerprint(sorted(files.canonical_json(to_row(anchor)) for anchor in anchors))


# The journal next to an unfinished bank: it records the accepted probes, so that generation can resume.


JOURNAL_FORMAT = "cplus-journal/1"


@dataclass(frozen=True)
class Journal:
    """Lines of JSON, each on disk before the next is started; the first line identifies the bank."""

    file: IO[bytes]
    entries: list[dict[str, Any]]

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add an entry; once this returns, the entry survives a crash."""
        self.file.write(files.canonical_json(entry).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.entries.append(dict(entry))


def journal_path(folder: Path) -> Path:
    """The journal of a bank: next to its folder, so that an unsealed folder never exists."""
    return folder.with_name(f"{folder.name}.partial.jsonl")


@contextmanager
def open_journal(
    path: Path,
    identity: Mapping[str, Any],
    *,
    wait: float = 0.0,
    notify: Callable[[str], None] = lambda sentence: None,
) -> Iterator[Journal]:
    """Open a journal for one process at a time; the error for a journal of another bank names the differences."""
    lock = locks.holding(locks.beside(path), wait=wait, notify=notify, otherwise="wait for it or choose another --out")
    with lock, open(path, "ab+", opener=files.open_itself) as file:
        journal = Journal(file, _whole_lines(file))
        head = {"format": JOURNAL_FORMAT, "identity": json.loads(files.canonical_json(identity))}
        if not journal.entries:
            journal.append(head)
            files.sync(path.parent)
        found = journal.entries.pop(0)
        if found != head:
            raise ValueError(f"{path} was started with other settings or versions; use those, or remove the file")
        yield journal


def _whole_lines(file: IO[bytes]) -> list[dict[str, Any]]:
    """All entries; a last line that a crash or a full disk cut short is removed from the file."""
    file.seek(0)
    entries, end = [], 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        try:
            entries.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{file.name}: line {len(entries) + 1} is damaged; remove the file and start again"
            ) from error
        end += len(line)
    file.truncate(end)
    file.seek(0, os.SEEK_END)
    return entries
