"""The paper's four sets at hand: selected from a folder or the hub, checked, and kept in the cache."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cplus import files
from cplus.data import hub
from cplus.data.examples import Example, lines
from cplus.data.paper_sets import Difference, compare, paper_sets, select
from cplus.data.readers import read_file

SPLITS: dict[str, tuple[str, ...]] = {
    "csqa": ("train", "validation"),
    "arc_c": ("train", "validation", "test"),
    "mmlu": ("test", "validation", "dev"),
    "medqa": ("train", "test"),
}
"""The splits of the hub's copies that the four sets were drawn from."""


@dataclass(frozen=True, kw_only=True)
class SetAtHand:
    """One of the four sets: where its rows are, and how they differ from the paper's."""

    name: str
    where: Path | None
    difference: Difference | None

    @property
    def same(self) -> bool:
        """Whether the rows at hand are the paper's."""
        return self.difference is not None and self.difference.same

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.name}: not at hand; 'cplus data build {self.name}' selects its rows from a folder or the hub"
        return f"{self.difference} ({self.where})"

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        found = {} if self.difference is None else self.difference.row()
        known = paper_sets()[self.name]
        return {
            "name": self.name,
            "rows": len(known.rows),
            "sha256": known.sha256,
            "where": None if self.where is None else str(self.where),
            "same": self.same,
            **found,
        }


def folder_of(data_dir: Path | None) -> Path | None:
    """The folder of benchmark files: the given one, or that of CPLUS_DATA."""
    return data_dir or (Path(os.environ["CPLUS_DATA"]) if os.environ.get("CPLUS_DATA") else None)


def cached(name: str) -> Path:
    """Where a built set is kept."""
    return files.cache_folder() / "data" / f"{name}.jsonl"


def at_hand(name: str, data_dir: Path | None = None) -> SetAtHand:
    """The rows that a run would read: those of the folder, else those of the cache; the hub is not asked."""
    folder = folder_of(data_dir)
    path = cached(name) if folder is None else folder / f"{name}.jsonl"
    if not path.is_file():
        return SetAtHand(name=name, where=None, difference=None)
    return SetAtHand(name=name, where=path, difference=compare(name, read_file(path)))


def build(name: str, data_dir: Path | None = None) -> SetAtHand:
    """Select the paper's rows from a folder's file or from the hub, check them and write them into the cache.

    Rows that are missing or have another answer or number of options are an error, and nothing is written.
    """
    source, rows = _source(name, folder_of(data_dir))
    found = select(name, rows)
    difference = compare(name, found)
    if difference.missing or difference.changed_answers or difference.other_options:
        raise ValueError(
            f"{source}: {difference}; nothing was written: give the folder of another copy with --data-dir"
        )
    path = cached(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, lines(found))
    return SetAtHand(name=name, where=path, difference=difference)


def _source(name: str, folder: Path | None) -> tuple[str, tuple[Example, ...]]:
    if folder is not None:
        path = folder / f"{name}.jsonl"
        return str(path), tuple(read_file(path))
    place = hub.BENCHMARKS[name]
    parts = (hub.read(replace(place, split=split), name=f"{name}-{split}") for split in SPLITS[name])
    return place.path, tuple(example for part in parts for example in part.examples)
