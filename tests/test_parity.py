"""A study's run and a job are one engine: the same settings give the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toyjob
from torch import Tensor, nn

from cplus import models
from cplus.distributed.processes import Interrupted
from cplus.jobs.adapt import adapt, resume
from cplus.lab import runs
from cplus.lab.runs import Comparison, set_up, split_task
from cplus.methods.table import METHODS
from cplus.training.settings import RunSpec

SPEC = RunSpec(
    model="toy-s", task="harbours", interface="cloze", method="sft", seed=3, num_anchors=4, num_probes=8, num_new=10,
    lr=3e-3, weight_decay=0.1, epochs=2, batch_size=4, order="shuffled", num_past=16,
)  # fmt: skip
KINDS = {"sft", "ssr", "ewc", "ogd", "cplus-cvar", "cplus-repair"}
"""A row of every kind: how it mixes rows, its objective, projection, evidence, gate and what acts after."""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def given(one_thread: None, cache: Path) -> Comparison:
    """What a study knows: rows, anchors, and a bank in the cache."""
    base = models.load("toy-s", device="cpu")
    return set_up(SPEC, base, split_task(base, SPEC.task, SPEC.interface), cache / "banks")


@pytest.fixture(scope="module")
def files(given: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows as a user has them."""
    folder = tmp_path_factory.mktemp("rows")
    toyjob.write_rows(folder / "new.jsonl", list(given.new.examples))
    toyjob.write_rows(folder / "keep.jsonl", list(given.anchors))
    toyjob.write_rows(folder / "past.jsonl", list(given.past.examples))
    return folder


def by_study(method: str, given: Comparison) -> dict[str, Tensor]:
    training = runs.begun(replace(SPEC, method=method), given)
    for _ in training.run():
        pass
    return weights(training.finish())


def settings(method: str, files: Path, out: Path, **changes: Any) -> Any:
    same: dict[str, Any] = {
        "model": "toy-s", "seed": SPEC.seed, "lr": SPEC.lr, "weight_decay": SPEC.weight_decay, "epochs": SPEC.epochs,
        "batch_size": SPEC.batch_size, "order": SPEC.order, "clip_norm": 0.0, "lr_schedule": "constant",
        "warmup_steps": 0, "evaluate_every": 0, "out": out, "method": method,
        **({"ema": "float32"} if METHODS[method].beta else {}),
    }  # fmt: skip
    return toyjob.asked(files, **same, **changes)


def by_job(method: str, files: Path, out: Path, **changes: Any) -> dict[str, Tensor]:
    adapt(settings(method, files, out, **changes))
    return weights(models.load(str(out / "model"), device="cpu").model)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    apart = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not apart


@pytest.mark.parametrize(
    "method",
    [name if name in KINDS else pytest.param(name, marks=pytest.mark.long) for name in METHODS if name != "cplus"],
)
def test_a_study_and_a_job_give_the_same_weights(method: str, given: Comparison, files: Path, tmp_path: Path) -> None:
    assert_same(by_job(method, files, tmp_path / "out"), by_study(method, given))
    if method == "sft":  # low-rank adapters as a row and as a setting
        assert_same(by_job("sft", files, tmp_path / "lora", lora="r=16"), by_study("lora", given))


def test_cplus_gives_the_same_weights_from_the_same_bank_and_another_setting_others(
    given: Comparison, files: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    banks = {path.name for path in (cache / "banks").glob("bank-*")}
    assert len(banks) == 1
    found = by_job("cplus", files, tmp_path / "out")
    assert "bank: reused from" in capsys.readouterr().err
    assert {path.name for path in (cache / "banks").glob("bank-*")} == banks
    assert_same(found, by_study("cplus", given))
    other = by_job("cplus", files, tmp_path / "other", beta=0.90001)  # the comparison can fail
    assert any(not torch.equal(found[name], other[name]) for name in found)


@pytest.mark.parametrize("method", ["cplus", "flow", "wise-ft"])
def test_a_resumed_job_gives_the_studys_weights(
    method: str, given: Comparison, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cplus.jobs import adapt as phase

    seen: list[int] = []

    def stop_at(step: int, go: Callable[[], object]) -> None:
        def stop(training: Any, event: Any) -> None:
            seen.append(training.log.cursor.step)
            if seen[-1] >= step:
                raise Interrupted(2, "stopped")

        with monkeypatch.context() as patch:
            patch.setattr(phase, "_check", stop)
            with pytest.raises(Interrupted):
                go()

    # Nothing is saved by the first event.
    stop_at(0, lambda: adapt(settings(method, files, tmp_path / "out", checkpoint_steps=1)))
    stop_at(5, lambda: resume(tmp_path / "out"))
    assert seen[-1] == 5
    resume(tmp_path / "out")
    found = weights(models.load(str(tmp_path / "out" / "model"), device="cpu").model)
    assert_same(found, by_study(method, given))
