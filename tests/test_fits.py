"""What a job needs in memory: the bytes of a real training, and the paper's largest models by their configuration."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import Phi3Config, Qwen3Config
from typer.testing import CliRunner

from cplus.cli.app import app
from cplus.jobs.memory import Bytes, guard_bytes, job_bytes, model_size, size_plan
from cplus.jobs.prepare import row_of
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


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_large_models_need_what_the_table_says(name: str, tmp_path: Path) -> None:
    (config, size), folder = PAPER[name], tmp_path
    config.save_pretrained(folder)
    row, lines = size_plan(job(folder), row_of(job(folder)), folder, "no weights here")
    assert row["size"]["parameters"] == pytest.approx(size, rel=0.01)
    needs = {text: own["total"] / 1e9 for text, own in row["bytes"].items()}
    assert needs["as chosen"] > 75  # of a device of 80 GB, where the driver and lost blocks take their part
    assert needs["--set gradient_checkpointing=true --set optimizer=adamw8bit"] < 75
    assert 15 < needs["--set gradient_checkpointing=true --lora r=16"] < 22.5  # float32 weights stay
    assert needs["--set gradient_checkpointing=true --lora r=16 --set load=4bit"] < 10
    chosen = Bytes(**{name: value for name, value in row["bytes"]["as chosen"].items() if name != "total"})
    assert chosen.over(8) < chosen.over(2) < 75e9 < chosen.over(1) == chosen.total
    shown = "\n".join(lines)
    assert "needs      --set gradient_checkpointing=true --lora r=16: " in shown
    assert "per parameter: weights 4.00, gradients 4.00, optimizer 8.00, gate " in shown


@pytest.mark.parametrize(("family", "method"), [("llama", "cplus"), ("qwen3", "sft"), ("phi3", "cpl")])
def test_bytes_are_those_of_a_real_training(
    make_tiny: Callable[[str], Any], family: str, method: str, tmp_path: Path
) -> None:
    model = make_tiny(family).model
    model.save_pretrained(tmp_path)
    config = job(tmp_path, method=method)
    said = job_bytes(config, METHODS[method], model_size(config, METHODS[method], tmp_path), 8, copies=True)
    training = start(config.model_copy(update={"lr": 1e-3}), METHODS[method], model.train(), tiny.material(new=4))
    guard = training.prepared.guard
    for _ in training.run():
        if training.log.cursor.step >= 2:
            break
    states = [v for own in training.optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor)]
    weights = sum(p.nbytes for p in model.parameters())
    assert said.weights == pytest.approx(weights, rel=0.1)
    gradients = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert said.gradients == pytest.approx(gradients, rel=0.1)
    assert said.optimizer == pytest.approx(sum(value.nbytes for value in states if value.numel() > 1), rel=0.1)
    if method == "sft":
        assert guard is None
        assert said.gate == 0
        return
    assert guard is not None
    # What an update on a GPU adds for a moment: it is gone between updates.
    copies = guard_bytes(config, METHODS[method], 8, said.gradients // 4, copies=True)[1] * said.gradients / 4
    assert guard.nbytes == pytest.approx(said.gate - copies, rel=0.1)


def test_the_plan_of_a_model_without_weights_says_what_it_needs(tmp_path: Path) -> None:
    folder = tmp_path / "qwen"
    QWEN3_4B.save_pretrained(folder)
    new = tmp_path / "new.jsonl"
    new.write_text('{"prompt": "Why?", "response": "Because."}\n')
    options = ["--new", str(new), "--out", str(tmp_path / "out"), "--plan", "--json"]
    done = CliRunner().invoke(app, ["adapt", str(folder), *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["reason"] == f"{folder} holds no weights, so nothing was timed"
    for own in found["bytes"].values():
        assert own["total"] == sum(value for name, value in own.items() if name != "total")
    assert not (tmp_path / "out").exists()


def test_the_plan_is_within_a_tenth_of_what_fake_tensors_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    script: Any = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "memory.py"))
    found = script["measured"]((1024, 3072, 4, 16, True), 1, 4096)
    assert found["traced"] == pytest.approx(found["planned"], rel=0.1)
