"""The fault matrix in its short form: every command that writes, each fault once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.matrix import FAULTS

from cplus.base import files


def table(place: Path, commands: list[str], faults: list[str]) -> list[dict[str, Any]]:
    """The cells of a short matrix; all must be green."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(place)}
    found = place / "cells.json"
    options = ["--times", "1", "--seed", "3", "--json", str(found), "--only", *commands, "--faults", *faults]
    line = [sys.executable, "-m", "faults", *options]
    run = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    cells: list[dict[str, Any]] = json.loads(found.read_text())["cells"]
    for cell in cells:
        assert any(cell["ends"]), f"the fault never came: {cell}"  # some process of it did not end well
    return cells


def test_adapt_survives_every_fault(tmp_path: Path) -> None:
    assert len(table(tmp_path, ["adapt"], [])) == len(FAULTS)


@pytest.mark.long
def test_the_others_survive_a_kill(tmp_path: Path) -> None:
    assert len(table(tmp_path, ["probe", "study", "update"], ["kill -9"])) == 3


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    folder = tmp_path / "model"
    if not exchanges:
        monkeypatch.setattr(files, "exchange", lambda left, right: False)
    for text in ("old", "new"):
        with files.replacing_folder(folder) as part:
            (part / "weights").write_text(text)
    assert (folder / "weights").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    with pytest.raises(FileNotFoundError), files.replacing_folder(folder) as part:
        (part / "nowhere" / "weights").write_text("newer")
    assert (folder / "weights").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_kill_between_two_renames_is_undone(tmp_path: Path) -> None:
    old, part = tmp_path / ".model.x_1.old", tmp_path / ".model.x_1.part"
    for folder in (old, part):
        folder.mkdir()
        (folder / "weights").write_text(folder.suffix)
    files.tidy(tmp_path, "bank")  # another name: nothing is touched
    assert old.exists()
    files.tidy(tmp_path, "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights").read_text() == ".old"


def test_exchanging_is_one_move(tmp_path: Path) -> None:
    left, right = tmp_path / "left", tmp_path / "right"
    left.write_text("l")
    right.mkdir()
    if not files.exchange(left, right):
        pytest.skip("this file system cannot exchange two names")
    assert left.is_dir()
    assert right.read_text() == "l"
    assert not files.exchange(left, tmp_path / "nowhere")


def test_an_altered_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    files.write_json(path, files.sealed({"retention": 90.0}))
    assert files.read_sealed(path)["retention"] == 90.0
    path.write_text(path.read_text().replace("90.0", "99.0"))
    with pytest.raises(ValueError, match="altered after it was written"):
        files.read_sealed(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def full(path: Path) -> Iterator[Path]:
        yield Path("/dev/full")

    monkeypatch.setattr(files, "replacing", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_state(Path("checkpoint.pt"), {"weights": torch.zeros(100_000)})
