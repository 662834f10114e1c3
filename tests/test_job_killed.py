"""SIGKILL at moments of a job, which is then resumed or finished: nothing is lost and the weights are the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import killed_adapt
import pytest
import torch
from toyjob import same, written
from typer.testing import CliRunner

from cplus.cli.app import app
from cplus.receipts.page import read_receipt

pytestmark = pytest.mark.usefixtures("one_thread", "cache")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """One job for each moment, killed at it."""
    folder = tmp_path_factory.mktemp("stopped")
    environment = {**os.environ, "CPLUS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # nothing that a fork would break
    command = [sys.executable, str(Path(__file__).with_name("killed_adapt.py")), str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == dict.fromkeys(killed_adapt.MOMENTS, -9), run.stderr
    return folder


@pytest.mark.parametrize("moment", killed_adapt.MOMENTS)
def test_finish_after_a_kill_writes_the_checkpoints_weights(stopped: Path, moment: str) -> None:
    out, (_, step), planned = stopped / moment, killed_adapt.MOMENTS[moment], killed_adapt.UPDATES
    kept = torch.load(out / "work" / "checkpoint.pt", weights_only=True)["state"]["weights"]
    run = CliRunner().invoke(app, ["adapt", "--finish", str(out), "--json"])
    assert run.exit_code == 0, run.output
    assert same(written(out), kept)
    record, receipt = json.loads((out / "record.json").read_text()), read_receipt(out)
    assert record["steps"] == step
    # A training that was whole when the process died is not called unfinished.
    cut = {"updates": step, "planned": planned} if step < planned else None
    assert record["unfinished"] == json.loads(run.stdout)["unfinished"] == cut
    assert receipt.title == "toy adapted by cpl" + (" (unfinished)" if cut else "")
    sentence = f"UNFINISHED: training was ended after update {step} of {planned}."
    for notes in (record["notes"], receipt.notes, (out / "README.md").read_text()):
        assert (sentence in notes) == (cut is not None)
    assert not (out / "work").exists()
    assert not [path for path in out.rglob("*") if path.suffix in (".part", ".old")]
