"""The same few rows through `transformers.Trainer` and through our own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, get_scheduler

from cplus.core.rows import Encoded
from cplus.methods.table import METHODS, Material, Past
from cplus.training.loop import Schedule, adapt, prepare

ANCHORS, PROBES = tiny.rows(4, seed=1), tiny.rows(6, seed=2)
# One length and one target token: then the trainer's mean over tokens is our mean over rows, without padding.
NEW = [Encoded(tuple((7 * i + j) % tiny.VOCABULARY for j in range(6)), ((3 * i) % tiny.VOCABULARY,)) for i in range(12)]
EPOCHS, BATCH = 3, 4


def features(row: Encoded) -> dict[str, list[int]]:
    ids = [*row.prompt, *row.target]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * len(row.prompt) + [*row.target]}


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "num_train_epochs": EPOCHS, "per_device_train_batch_size": BATCH, "use_cpu": True,
        "learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "weight_decay": 0.0,
        "train_sampling_strategy": "sequential", "save_strategy": "no", "logging_steps": 1, "report_to": "none",
        "disable_tqdm": True, "optim": "adamw_torch", "bf16": False,
    }  # fmt: skip
    return settings | changes


def trainer(folder: Path, model: nn.Module | None = None, callbacks: Any = None, **changes: Any) -> Trainer:
    return Trainer(
        model=model or tiny.lm(),
        args=TrainingArguments(**arguments(folder, **changes)),
        train_dataset=[features(row) for row in NEW],
        eval_dataset=[features(row) for row in NEW[:4]],
        data_collator=default_data_collator,
        callbacks=callbacks,
    )


def ours(clip_norm: float | None = None, schedule: str = "constant", divisor: int = 1) -> nn.Module:
    """The same rows through our own loop, the gradients of each step divided by `divisor`."""
    model = tiny.lm()
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    optimizer.register_step_pre_hook(lambda *_: divide(model, divisor))
    material = Material(new=NEW, past=(Past(name="past", anchors=ANCHORS, probes=PROBES),))
    prepared = prepare(METHODS["cplus"], optimizer, model, material, seed=0)
    steps = EPOCHS * len(NEW) // BATCH
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=2, num_training_steps=steps)
    epochs = Schedule(epochs=EPOCHS, batch_size=BATCH, clip_norm=clip_norm)
    for _ in adapt(model, optimizer, prepared, schedule=epochs, seed=0, scheduler=scheduler):
        pass
    return model


def divide(model: nn.Module, divisor: int) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad /= divisor


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def check_same(found: nn.Module, expected: nn.Module) -> None:
    apart, moved = (flat(found) - flat(expected)).abs(), (flat(found) - flat(tiny.lm())).abs()
    assert float(apart.max()) < 1e-5
    assert float(apart.mean()) < 1e-7
    assert float(moved.mean()) > 1e-3


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


class Stop(TrainerCallback):
    """A run that dies at a step, after the checkpoint if there is one."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise InterruptedError
