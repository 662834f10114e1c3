"""Where a user could get stuck: a stop before the first update, banks of other commands and versions, no rows."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from toyjob import same, write_files, written
from typer.testing import CliRunner

import cplus
from cplus import models
from cplus.base import files
from cplus.cli.app import app

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A folder with new rows, and in `whole` a job of seconds that learned them; the cache holds its bank."""
    folder = tmp_path_factory.mktemp("place")
    write_files(folder)
    assert adapt(folder, folder / "whole").exit_code == 0
    return folder


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def adapt(place: Path, out: Path) -> Any:
    """A job of seconds with nothing but new rows."""
    lines = ["interface=cloze", "max_new_tokens=2", "epochs=2", "lr=1e-3", "stop=never", "checkpoint_steps=1"]
    more = [word for line in lines for word in ("--set", line)]
    return invoke("adapt", "toy", "--new", str(place / "new.jsonl"), "--out", str(out), "--device", "cpu", *more)


def banks(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "banks").iterdir() if path.is_dir())


def test_a_job_stopped_before_its_first_update_is_resumed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    out, folder = tmp_path / "out", tmp_path / "cache" / "banks"

    def press(pattern: str) -> None:
        """Ctrl-C as soon as a file of this pattern exists."""
        while not any(folder.glob(pattern)):
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGINT)

    # While it writes its rows, then while the resumed job measures them.
    for pattern in ("*.partial.jsonl", "bank-*/manifest.json"):
        threading.Thread(target=press, args=(pattern,), daemon=True).start()
        done = invoke("adapt", "--resume", str(out)) if out.exists() else adapt(place, out)
        assert done.exit_code == 130, done.output
        assert f"Continue with: cplus adapt --resume {out}" in done.stderr.replace("\n", " ")
        assert "--finish" not in done.stderr
        nothing = invoke("adapt", "--finish", str(out))
        assert "nothing was trained yet, so there is nothing to finish; use --resume" in str(nothing.exception)
    again = invoke("adapt", "--resume", str(out))
    assert again.exit_code == 0, again.output
    assert len(banks(tmp_path / "cache")) == 1
    assert same(written(out), written(place / "whole"))


def test_adapt_repair_and_check_find_one_bank_and_another_version_does_too(place: Path, cache: Path) -> None:
    [bank] = banks(cache)
    tuned = str(place / "whole" / "model")
    repaired = invoke(
        "repair", "toy", tuned, "--new", str(place / "new.jsonl"), "--out", str(place / "repaired"),
        "--set", "max_new_tokens=2", "--set", "interface=cloze", "--set", "device=cpu",
    )  # fmt: skip
    assert bank in (repaired.stderr + str(repaired.exception)).replace("\n", "")
    checked = invoke("check", "toy", tuned, "--device", "cpu")
    assert bank in checked.stderr.replace("\n", "")
    # As if another version had written it: its manifest says so, and its name is a hash that includes the version.
    sealed = cache / "banks" / bank
    manifest = files.read_json(sealed / "manifest.json")
    del manifest["seal"]
    manifest["engine"]["transformers"] = "4.0.0"
    files.write_json(sealed / "manifest.json", {**manifest, "seal": files.fingerprint(manifest)})
    sealed.rename(sealed.with_name("bank-of-another-version"))
    later = adapt(place, place / "later")
    assert later.exit_code == 0, later.output
    assert "bank-of-another-version; written with transformers 4.0.0" in later.stderr
    assert banks(cache) == ["bank-of-another-version"]


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
