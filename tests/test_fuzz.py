"""Every reader under a short seeded search; `make fuzz` runs the long one. What it found stands below by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fuzzing import FREE, Target, fuzz, quiet, targets

from cplus.base import terminal
from cplus.base.files import read_json
from cplus.evaluation.judges import is_json
from cplus.jobs.settings import read_yaml

INPUTS = int(os.environ.get("CPLUS_FUZZ", "60"))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return {target.name: target for target in targets(tmp_path_factory.mktemp("fuzz"))}


NAMES = [
    "rows.jsonl", "rows.json", "rows.csv", "judge.json", "terminal",
    "bank", "receipt", "run record", "checkpoint", "journal", "config", "job settings", "requirement",
    "gguf",
]  # fmt: skip


def test_every_target_is_listed(known: dict[str, Target]) -> None:
    assert set(NAMES) == set(known)


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_accepts_or_refuses_and_never_crashes(known: dict[str, Target], name: str) -> None:
    with quiet():
        found = fuzz(known[name], INPUTS, first_seed=11)
    assert len(found) > 1 or name == "terminal", f"the inputs reach one side only: {found}"


# Found by it, and mended


def test_deeply_nested_json_and_yaml_are_refused_and_a_text_that_turns_the_line_around_is_cleaned(
    tmp_path: Path,
) -> None:
    assert not is_json("[" * 200_000, FREE[0])
    assert not is_json("9" * 5000, FREE[0])
    (tmp_path / "a.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="does not parse"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.yaml").write_text("a: " + "[" * 20_000)
    with pytest.raises(ValueError, match="expected YAML"):
        read_yaml(tmp_path / "a.yaml")
    assert terminal.clean("a\u202egnp.exe\u2066b") == "agnp.exeb"


def test_a_journal_of_another_shape_is_refused(known: dict[str, Target]) -> None:
    assert known["journal"].check(b'{"format": "cplus-journal/1", "other": {}}\n') == "refused"
    assert known["journal"].check(b"[]\n") == "refused"
