"""Other finished jobs on the same rows, whose curves the receipt shows beside this one's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cplus import files
from cplus.data.examples import fingerprint
from cplus.experiment.rows import Group
from cplus.job.folder import Folder
from cplus.receipts.receipt import ComparedRun, read_receipt


def row_hashes(groups: Sequence[Group]) -> dict[str, str]:
    """Hashes of the rows that two compared jobs must share, by their part."""
    return {group.part: fingerprint(group.examples) for group in groups if group.part != "external"}


def curves(places: Sequence[Path], groups: Sequence[Group], own: str) -> dict[str, ComparedRun]:
    """The curves of finished jobs by method; where two have the same method, the folder's name is added."""
    found: dict[str, ComparedRun] = {}
    for place in places:
        method, curve = _curve(place, row_hashes(groups))
        name = method if method not in (own, *found) else f"{method} ({place.name})"
        found[name] = curve
    return found


def _curve(place: Path, expected: Mapping[str, str]) -> tuple[str, ComparedRun]:
    folder = Folder(place)
    if not folder.record.is_file():
        raise ValueError(f"{place}: expected the folder of a finished job to compare with; it holds no record.json")
    record = files.read_sealed(folder.record)
    different = [part for part in expected if record["rows"].get(part) != expected[part]]
    if different:
        raise ValueError(
            f"{place}: its {' and '.join(different)} rows differ from this job's; compare jobs on the same rows"
        )
    settings: dict[str, Any] = record["settings"]
    return settings["method"], ComparedRun(curve=read_receipt(place).curve, settings=settings)
