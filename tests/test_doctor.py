"""`cplus doctor` reports what works and what to install; its exit code tells whether anything is bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cplus.cli import app, doctor, gpu
from cplus.core import kernels


def run(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app.app, ["doctor", *options])
    return done.exit_code, done.stdout


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("cplus.core.kernels.can_compile", lambda device: True)  # seconds, and its own tests try it
    monkeypatch.setattr(gpu, "LAYERS", 2)
    monkeypatch.setattr(gpu, "WIDTH", 16)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # tests need no network
    return tmp_path / "cache"


def test_a_whole_installation_is_good_in_words_and_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run("--json")
    report = json.loads(said)
    assert code == 0, said
    assert report["good"] is True
    areas = {one["area"] for one in report["findings"]}
    assert areas == {"packages", "devices", "kernels", "disk", "hub", "optional", "training"}
    found = {one["name"]: one for one in report["findings"]}
    assert {"cplus", "torch", "transformers", "cpu", "cache", "cplus[data]", "wandb"} <= set(found)
    absent = [one["do"] for one in report["findings"] if one["state"] == "absent" and one["area"] == "optional"]
    assert all(do.startswith("pip install") for do in absent)
    step = found["gated step"]
    assert step["measured"]["ratio"] > 0
    assert step["measured"]["vector_bits"] == kernels.vector()[0]
    assert f"{kernels.vector()[0]}-bit vectors" in step["says"]
    monkeypatch.setattr("cplus.core.kernels.can_compile", lambda device: False)
    code, said = run()
    assert code == 0
    assert "Everything required works." in said
    assert "install a C++ compiler" in " ".join(said.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_same_checks_run_on_the_processor_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run("--gpu", "--json")
    report = json.loads(said)
    assert code == 0, said
    found = {one["name"]: one for one in report["findings"] if one["area"] == "gpu"}
    assert set(found) == {"not run", "kernels", "speed"}
    assert found["not run"]["says"].startswith("No GPU was used. No kernel ran on a GPU")
    assert len(found["kernels"]["measured"]["units_of_last_place"]) == 8
    assert set(found["speed"]["measured"]["milliseconds"]) == {"plain", "one_pass", "hooks"}
    assert report["environment"]["versions"]["torch"]

    right = kernels.run

    def wrong(kernel: str, tensors: Any, packed: torch.Tensor, *rest: Any) -> None:
        """Plus is taken for minus."""
        right(kernel, tensors, (packed & 0x55) << 1 | (packed & 0xAA) >> 1, *rest)

    monkeypatch.setattr(kernels, "run", wrong)
    code, said = run("--gpu", "--device", "cpu", "--json")
    [bad] = [one for one in json.loads(said)["findings"] if one["state"] == "bad"]
    assert (code, bad["name"]) == (1, "kernels")
    assert "issue" in bad["do"]


def test_what_does_not_work_is_bad_and_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **rest: object) -> None:
        raise ValueError("could not load 'toy-s': no weights")

    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: {"gguf": None, "scipy": "0.1"}.get(name, real(name)))
    monkeypatch.setenv("CPLUS_CACHE", "/proc/nowhere")
    monkeypatch.setattr("cplus.models.load", broken)
    code, said = run("--json")
    bad = {one["name"]: one for one in json.loads(said)["findings"] if one["state"] == "bad"}
    assert code == 1
    assert set(bad) == {"gguf", "scipy", "writable", "failed"}
    assert bad["gguf"]["do"].startswith("pip install 'gguf>=")
    assert "0.1 is installed" in bad["scipy"]["says"]
    assert "CPLUS_CACHE" in bad["writable"]["do"]
    assert "no weights" in bad["failed"]["says"]
