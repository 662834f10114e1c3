"""Every stored result of a study is still found: its name follows from its settings, and its seal holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cplus.lab.runner import load_result, load_sequence, path_of

RESULTS = Path(__file__).parent.parent / "results"
STORED = {"desk": 1204, "desk-real": 49}


def records(scale: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each record's stored name, its content, and the name that the package gives to its settings."""
    folder = RESULTS / scale
    for path in folder.glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        result = load_sequence(path) if record.get("kind") == "sequence" else load_result(path)
        yield path.name, record, path_of(result.spec, folder).name


def seal(record: dict[str, Any]) -> str:
    """The hash of all but the seal itself."""
    unsealed = {name: value for name, value in record.items() if name != "sha256"}
    text = json.dumps(unsealed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("scale", STORED)
def test_every_stored_record_has_the_name_of_its_settings_and_its_seal(scale: str) -> None:
    found = list(records(scale))
    assert len(found) >= STORED[scale]
    assert [(name, own) for name, _, own in found if name != own] == []
    assert [name for name, record, _ in found if seal(record) != record["sha256"]] == []
