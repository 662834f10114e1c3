"""Where a user could get stuck: a stop before the first update, banks of other commands and versions, no rows."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import transformers
from toyjob import same, write_files, written
from typer.testing import CliRunner

import cplus
from cplus import models
from cplus.cli.app import app

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with new rows and an empty cache."""
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    write_files(tmp_path)
    return tmp_path


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def adapt(place: Path, out: str) -> Any:
    """A job of seconds with nothing but new rows."""
    lines = ["interface=cloze", "max_new_tokens=2", "epochs=2", "lr=1e-3", "stop=never", "checkpoint_steps=1"]
    more = [word for line in lines for word in ("--set", line)]
    new = str(place / "new.jsonl")
    return invoke("adapt", "toy", "--new", new, "--out", str(place / out), "--device", "cpu", *more)


def banks(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "cache" / "banks").iterdir() if path.is_dir())


def stopped(place: Path, out: str, when: Path, pattern: str) -> Any:
    """The job, with Ctrl-C as soon as a file of this pattern exists."""

    def press() -> None:
        while not any(when.glob(pattern)):
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    return adapt(place, out)


@pytest.mark.parametrize(("name", "pattern"), [("writing", "*.partial.jsonl"), ("measuring", "bank-*/manifest.json")])
def test_a_job_stopped_before_its_first_update_is_resumed(place: Path, name: str, pattern: str) -> None:
    done = stopped(place, name, place / "cache" / "banks", pattern)
    assert done.exit_code == 130, done.output
    assert f"Continue with: cplus adapt --resume {place / name}" in done.stderr.replace("\n", " ")
    assert "--finish" not in done.stderr
    nothing = invoke("adapt", "--finish", str(place / name))
    assert "nothing was trained yet, so there is nothing to finish; use --resume" in str(nothing.exception)
    again = invoke("adapt", "--resume", str(place / name))
    assert again.exit_code == 0, again.output
    whole = adapt(place, "whole")
    assert whole.exit_code == 0, whole.output
    assert len(banks(place)) == 1  # neither wrote its rows anew
    assert same(written(place / name), written(place / "whole"))


def test_adapt_repair_and_check_find_one_bank_and_another_version_does_too(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert adapt(place, "out").exit_code == 0
    [bank] = banks(place)
    repaired = invoke(
        "repair", "toy", str(place / "out" / "model"), "--new", str(place / "new.jsonl"),
        "--out", str(place / "repaired"), "--set", "max_new_tokens=2", "--set", "interface=cloze",
        "--set", "device=cpu",
    )  # fmt: skip
    assert bank in (repaired.stderr + str(repaired.exception)).replace("\n", "")
    checked = invoke("check", "toy", str(place / "out" / "model"), "--device", "cpu")
    assert bank in checked.stderr.replace("\n", "")
    monkeypatch.setattr(transformers, "__version__", "99.9.0")
    later = adapt(place, "later")
    assert later.exit_code == 0, later.output
    assert banks(place) == [bank]


def test_a_job_that_cannot_work_leaves_nothing_and_replaces_nothing(place: Path) -> None:
    new, out = str(place / "new.jsonl"), place / "out"
    words = ["adapt", "toy", "--new", new, "--out", str(out), "--set", "interface=cloze"]
    assert "keeping json needs a chat template" in str(invoke(*words, "--keep", "json").exception)
    assert not out.exists()
    assert invoke(*words, "--keep", "none", "--method", "sft", "--epochs", "1").exit_code == 0
    assert "keeping json needs a chat template" in str(invoke(*words, "--keep", "json", "--force").exception)
    assert (out / "record.json").is_file()


def test_probes_are_written_without_rows(place: Path) -> None:
    loaded = models.load("toy", device="cpu")
    bank = cplus.probe(loaded.model, loaded.tokenizer, num_probes=4)
    assert len(bank.probes) == 4
    assert bank.manifest["anchors"]["count"] == 0
    assert cplus.probe(loaded.model, loaded.tokenizer, num_probes=4) == bank
