"""`cplus doctor` says what works and what to install, and its exit code says whether anything is bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cplus import cli, native
from cplus.commands import doctor

if not cli.app.registered_commands:
    cli.register()


def run(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["doctor", *options])
    return done.exit_code, done.stdout


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("cplus.kernels.can_compile", lambda device: True)  # seconds, and its own tests try it
    monkeypatch.setattr(doctor, "_TIMED", (2, 1000))
    return tmp_path / "cache"


def test_a_whole_installation_is_good_in_words_and_in_json() -> None:
    code, said = run("--json")
    report = json.loads(said)
    assert code == 0, said
    assert report["good"] is True
    areas = {one["area"] for one in report["findings"]}
    assert areas == {"packages", "devices", "precision", "speed", "disk", "cache", "extras", "engines", "work"}
    for one in report["findings"]:
        if one["state"] in ("absent", "bad") and one["area"] in ("extras", "engines"):
            assert one["do"].startswith("pip install"), one
    code, said = run()
    assert code == 0
    assert "Everything needed works." in said


def test_the_gated_step_is_measured_with_the_width_of_the_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    _, said = run("--json")
    [step] = [one for one in json.loads(said)["findings"] if one["name"] == "gated step"]
    assert step["measured"]["ratio"] > 0
    assert step["measured"]["vector_bits"] == native.vector()[0]
    assert f"{native.vector()[0]}-bit vectors" in step["says"]
    monkeypatch.setattr("cplus.kernels.can_compile", lambda device: False)
    assert doctor._step().state == "absent"


def test_a_missing_package_is_bad_and_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._installed
    monkeypatch.setattr(doctor, "_installed", lambda name: {"gguf": None, "scipy": "0.1"}.get(name, real(name)))
    code, said = run("--json")
    bad = {one["name"]: one for one in json.loads(said)["findings"] if one["state"] == "bad"}
    assert code == 1
    assert set(bad) == {"gguf", "scipy"}
    assert bad["gguf"]["do"].startswith("pip install 'gguf>=")
    assert "0.1 is installed" in bad["scipy"]["says"]


def test_a_cache_that_cannot_be_written_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPLUS_CACHE", "/proc/nowhere")
    found = [one for one in doctor.storage() if one.state == "bad"]
    assert [one.name for one in found] == ["writable"]
    assert "CPLUS_CACHE" in found[0].do


def test_a_model_that_does_not_load_is_a_finding_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **rest: object) -> None:
        raise ValueError("could not load 'toy-s': no weights")

    monkeypatch.setattr("cplus.models.load", broken)
    code, said = run()
    assert code == 1
    assert "no weights" in said


def test_other_versions_than_the_tested_ones_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_constraints", lambda: {"gguf": "0.0.1"})
    notes = [one for one in doctor.packages() if one.state == "note"]
    assert len(notes) == 1
    assert "(tested: 0.0.1)" in notes[0].says
