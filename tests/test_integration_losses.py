"""Trainers with losses of their own: `preserve` gives the weights of a hand-written loop with the same loss."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from trained import flat

from cplus.core.guard import protect
from cplus.integrations.transformers import preserve

EXAMPLES = Path(__file__).parent.parent / "examples"
KINDS = {
    **dict.fromkeys(("classification", "seq2seq"), "own_loss_trainers"),
    **dict.fromkeys(("dpo", "kto", "grpo"), "preference_trainers"),
    "reward": "reward_trainer",
}
SAME = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "weight_decay": 0.0,
    "train_sampling_strategy": "sequential",
    "optim": "adamw_torch",
    "disable_tqdm": True,
    "seed": 0,
}


def built(name: str) -> tuple[Any, dict[str, Any]]:
    """An example's trainer and evidence, without dropout, always the same; what GRPO samples is sampled once."""
    torch.manual_seed(0)
    example = importlib.import_module(KINDS[name])
    run, evidence = example.build(**SAME) if name == "reward" else example.build(name, **SAME)
    for module in run.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if name == "grpo":
        torch.manual_seed(1)
        run.model.train()
        batch = run._prepare_inputs(next(iter(run.get_train_dataloader())))
        run._prepare_inputs = lambda _: batch
        run.current_gradient_accumulation_steps = 1
    return run, evidence


@pytest.mark.parametrize("name", KINDS)
def test_a_trainer_with_its_own_loss_gives_the_weights_of_a_hand_written_loop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    run, evidence = built(name)
    start = flat(run.model)
    callback = preserve(run, **evidence)
    run.train()
    assert callback.guard is not None
    assert callback.guard.steps == run.state.global_step > 2

    other, evidence = built(name)
    assert torch.equal(flat(other.model), start)
    model = other.model
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    guard = protect(optimizer, model, **evidence)
    model.train()
    for _ in range(2):
        guard.refresh()
        for inputs in other.get_train_dataloader():
            optimizer.zero_grad()
            other.compute_loss(model, other._prepare_inputs(inputs)).backward()
            optimizer.step()
    assert guard.steps == callback.guard.steps
    apart, moved = (flat(run.model) - flat(model)).abs(), (flat(run.model) - start).abs()
    assert float(apart.max()) < 1e-5
    assert float(apart.mean()) < 1e-7
    assert float(moved.mean()) > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_the_example_runs_as_a_script(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["example.py", name])
    found = runpy.run_path(str(EXAMPLES / f"{KINDS[name]}.py"), run_name="__main__")
    trainer = found["trainer"]
    assert trainer.state.global_step > 2
    assert any(callback.guard.steps for callback in trainer.callback_handler.callbacks if hasattr(callback, "guard"))
