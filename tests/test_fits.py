"""Which devices a job fits on: the bytes of a real training, and the paper's largest models by their configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import Phi3Config, PretrainedConfig, Qwen3Config

from cplus.jobs.memory import Parts, device_plan, job_parts, model_size
from cplus.jobs.settings import AdaptConfig
from cplus.methods.table import METHODS
from cplus.training.driver import start

QWEN3_4B = Qwen3Config(
    hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    intermediate_size=9728, vocab_size=151936, tie_word_embeddings=True, dtype="bfloat16",
)  # fmt: skip
PHI_35 = Phi3Config(
    hidden_size=3072, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32, intermediate_size=8192,
    vocab_size=32064, tie_word_embeddings=False, dtype="bfloat16", max_position_embeddings=4096,
)  # fmt: skip
# Sizes as their model cards give them.
PAPER = {"qwen3-4b": (QWEN3_4B, 4.02e9), "phi-3.5-mini": (PHI_35, 3.82e9)}


def job(folder: Path, **changes: Any) -> AdaptConfig:
    return AdaptConfig(**{"model": str(folder), "new": "new.jsonl", "out": folder / "out", "device": "cpu", **changes})


def saved(config: PretrainedConfig, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_large_models_fit_where_the_table_says(name: str, tmp_path: Path) -> None:
    config, size = PAPER[name]
    folder = saved(config, tmp_path)
    plan = device_plan(job(folder), METHODS["cplus"], folder, 8, reason="no weights here")
    assert plan.size.parameters == pytest.approx(size, rel=0.01)
    where = {(fit.devices, fit.gigabytes): fit for fit in plan.devices}
    assert where[1, 24].settings == "--set gradient_checkpointing=true --lora r=16"  # 16 GB of float32 weights stay
    assert where[1, 80].settings == "--set gradient_checkpointing=true --set ema=uint8 --set optimizer=adamw8bit"
    assert where[2, 80].settings == ""
    assert where[8, 80].settings == ""
    assert where[8, 80].parts.total < where[2, 80].parts.total < plan.parts.total
    for fit in plan.devices:
        assert (fit.settings is not None) == (fit.parts.total <= 0.94 * fit.gigabytes * 1e9)
    shown = "\n".join(plan.lines())
    assert "devices    1 x 24 GB: --set gradient_checkpointing=true --lora r=16, " in shown
    assert "per parameter: weights 4.00, gradients 4.00, optimizer 8.00, gate " in shown
    assert plan.row()["devices"][0]["devices"] == 1


def test_without_peft_no_adapters_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(PHI_35, tmp_path)
    monkeypatch.setattr("cplus.jobs.memory.find_spec", lambda name: None)
    found = device_plan(job(folder), METHODS["cplus"], folder, 8, reason="no weights here").devices
    assert found[0].settings is None
    assert all("lora" not in (fit.settings or "") for fit in found)


def test_a_machine_on_which_nothing_fits_is_told_the_least(tmp_path: Path) -> None:
    large = Qwen3Config(
        hidden_size=16384, num_hidden_layers=10, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
        intermediate_size=98304, vocab_size=152064,
    )  # fmt: skip
    folder = saved(large, tmp_path)
    found = device_plan(job(folder), METHODS["cplus"], folder, 8, reason="no weights here").devices
    packed = "--set gradient_checkpointing=true --lora r=16 --set load=4bit"  # which cannot be sharded
    assert [fit.settings for fit in found] == [None, None, packed, None, None]
    assert "1 x 24 GB: no, the least is" in str(found[0])


@pytest.mark.parametrize(("family", "method"), [("llama", "cplus"), ("qwen3", "sft"), ("phi3", "cpl")])
def test_bytes_are_those_of_a_real_training(
    make_tiny: Callable[[str], Any], family: str, method: str, tmp_path: Path
) -> None:
    model = make_tiny(family).model
    model.save_pretrained(tmp_path)
    config = job(tmp_path, method=method)
    said = job_parts(config, METHODS[method], model_size(config, METHODS[method], tmp_path), 8)
    training = start(replace(config.settings(4), lr=1e-3), METHODS[method], model.train(), tiny.material(new=4))
    for _ in training.run():
        guard = training.prepared.guard
        break_off = training.log.cursor.step >= 2
        if break_off:
            break
    states = [v for own in training.optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor)]
    held = Parts(
        weights=sum(p.nbytes for p in model.parameters()),
        gradients=4 * sum(p.numel() for p in model.parameters() if p.requires_grad),
        optimizer=sum(value.nbytes for value in states if value.numel() > 1),
        gate=0 if guard is None else guard.nbytes,
        objective=0,
        activations=0,
    )
    assert said.weights == pytest.approx(held.weights, rel=0.1)
    assert said.gradients == pytest.approx(held.gradients, rel=0.1)
    assert said.optimizer == pytest.approx(held.optimizer, rel=0.1)
    if method == "sft":
        assert said.gate == held.gate == 0
    else:
        assert guard is not None
        assert held.gate == pytest.approx(said.gate - _copies(config, method, said), rel=0.1)


def _copies(config: AdaptConfig, method: str, said: Parts) -> float:
    """What an update on a GPU adds for a moment: it is gone between updates."""
    from cplus.jobs.memory import guard_bytes

    return guard_bytes(config, METHODS[method], 8, said.gradients // 4, copies=True)[1] * said.gradients / 4


def test_the_plan_of_a_model_without_weights_says_what_fits_where(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from cplus.cli.app import app

    folder = saved(QWEN3_4B, tmp_path / "qwen")
    new = tmp_path / "new.jsonl"
    new.write_text('{"prompt": "Why?", "response": "Because."}\n')
    done = CliRunner().invoke(
        app, ["adapt", str(folder), "--new", str(new), "--out", str(tmp_path / "out"), "--plan", "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["reason"] == f"{folder} holds no weights, so nothing was timed"
    assert [(fit["devices"], fit["gigabytes"]) for fit in found["devices"]] == [
        (1, 24),
        (1, 48),
        (1, 80),
        (2, 80),
        (8, 80),
    ]
    assert found["bytes"]["total"] == sum(value for name, value in found["bytes"].items() if name != "total")
    assert not (tmp_path / "out").exists()
