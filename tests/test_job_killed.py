"""SIGKILL at fourteen moments of one job, resumed each time: nothing is lost and the weights are the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from killed_job import MOMENTS

from cplus.files import sha256_file
from cplus.receipts.receipt import read_receipt


def test_a_job_killed_again_and_again_ends_bitwise_as_if_never_stopped(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_job.py")
    environment = {**os.environ, "CPLUS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # nothing that a fork would break
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "7"], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    ends = json.loads(run.stdout.splitlines()[-1])
    assert ends == {**dict.fromkeys(MOMENTS, -9), "the end": 0}, run.stderr
    assert run.stderr.count("resumed after update") >= 6
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert sha256_file(out / "model" / "model.safetensors") == sha256_file(whole / "model" / "model.safetensors")
    assert sha256_file(out / "bank" / "probes.jsonl") == sha256_file(whole / "bank" / "probes.jsonl")
    records = [json.loads((folder / "record.json").read_text()) for folder in (out, whole)]
    for name in ("figures", "curve", "steps", "counts"):
        assert records[0][name] == records[1][name]
    read_receipt(out)
    assert {entry.name for entry in out.iterdir()} == {entry.name for entry in whole.iterdir()}
    assert not [path for path in out.rglob("*") if path.suffix in (".part", ".old")]
