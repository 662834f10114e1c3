"""Whole banks of the toy model: the same byte for byte, also after being killed in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cplus import models
from cplus.cli.app import app
from cplus.data import interfaces
from cplus.probes.bank import Bank
from cplus.probes.build import build
from cplus.probes.settings import ProbeSettings
from cplus.probes.writing import write_probes
from cplus.toy.world import taught


@pytest.fixture
def base() -> Iterator[models.Loaded]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield models.load("toy", device="cpu")
    torch.set_num_threads(threads)


def test_what_the_toy_model_writes_is_sealed_and_new(base: models.Loaded, tmp_path: Path) -> None:
    anchors = taught("plants")[::111][:8]
    interface = interfaces.build("cloze", base.tokenizer)
    settings = ProbeSettings(num_probes=64, seed=5)
    bank = build(tmp_path / "bank", base, interface, anchors, settings)
    assert Bank.load(tmp_path / "bank", model_fingerprint=base.fingerprint, anchors=anchors) == bank
    assert bank.manifest["yield"] > 0.5
    assert list(bank.probes) == write_probes(base, interface, anchors, settings)
    assert all(interface.encode(example).target for example in bank.examples)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--anchors", "8"], "expected a task to draw 8 anchors from"),
        (["--anchors", "99999", "--task", "harbours"], "asked for 99999"),
        (["--task", "harbours", "--set", "min_yield=0"], "min_yield must be above 0"),
        (["--task", "harbours", "--set", "min_yield=much"], "min_yield must be a valid number"),
        (["--task", "harbours", "--set", "min_yeild=1"], "'min_yeild' is not a setting; did you mean min_yield?"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    result = CliRunner().invoke(app, ["probe", "toy", *arguments, "--out", str(tmp_path / "bank")])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert not (tmp_path / "bank").exists()
