"""Every reader under a short seeded search; `make fuzz` runs the long one. What it found stands below by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fuzzing import CHOICES, FREE, MADE, Target, fuzz, quiet, targets

from cplus import models
from cplus.base import terminal
from cplus.base.files import read_json
from cplus.data.examples import fingerprint
from cplus.evaluation.judges import is_json
from cplus.jobs.settings import read_yaml

INPUTS = int(os.environ.get("CPLUS_FUZZ", "120"))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    tokenizer = models.load("toy", device="cpu").tokenizer
    return {target.name: target for target in targets(tmp_path_factory.mktemp("fuzz"), tokenizer)}


NAMES = [
    "rows.jsonl", "rows.json", "rows.csv", "parse.letter", "parse.cloze", "parse.freeform", "judge.json", "terminal",
    "bank", "receipt", "run record", "checkpoint", "journal", "split", "config", "job settings", "requirement",
    "gguf",
]  # fmt: skip


def test_every_target_is_listed(known: dict[str, Target]) -> None:
    assert set(NAMES) == set(known)


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_accepts_or_refuses_and_never_crashes(known: dict[str, Target], name: str) -> None:
    with quiet():
        found = fuzz(known[name], INPUTS, first_seed=11, made=min(MADE, INPUTS // 2))
    assert found["inputs"] >= INPUTS // 2
    if name not in ("terminal",):
        assert len(found["outcomes"]) > 1, f"the inputs reach one side only: {found}"


# Found by it, and mended


def test_deeply_nested_json_is_no_json_and_no_crash(tmp_path: Path) -> None:
    assert not is_json("[" * 200_000, FREE[0])
    assert not is_json("9" * 5000, FREE[0])
    (tmp_path / "a.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="does not parse"):
        read_json(tmp_path / "a.json")


def test_deeply_nested_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: " + "[" * 20_000)
    with pytest.raises(ValueError, match="expected YAML"):
        read_yaml(tmp_path / "a.yaml")


def test_a_text_that_turns_the_line_around_is_cleaned() -> None:
    assert terminal.clean("a\u202egnp.exe\u2066b") == "agnp.exeb"


def test_a_journal_and_a_split_of_another_shape_are_refused(known: dict[str, Target]) -> None:
    assert known["journal"].check(b'{"format": "cplus-journal/1", "other": {}}\n') == "refused"
    assert known["journal"].check(b"[]\n") == "refused"
    head = b'{"data_fingerprint": %s, "model_fingerprint": "m", "interface": "cloze", "stack": %s, "predictions": %s}'
    right = b'"' + fingerprint(CHOICES).encode() + b'"'
    for data, stack, rows in (
        (b"7", b"{}", b"[]"),
        (right, b"{}", b"[7]"),
        (right, b"{}", b"[{}]"),
        (right, b"7", b"8"),
    ):
        assert known["split"].check(head % (data, stack, rows)) == "refused"
