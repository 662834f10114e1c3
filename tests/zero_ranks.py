"""Training a tiny model under DeepSpeed ZeRO in real processes, and the same updates in a plain loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
import trained
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import TrainerCallback

from cplus.core.gates import Proposal
from cplus.core.guard import Guard, protect
from cplus.core.losses import answer_losses
from cplus.core.rows import Encoded
from cplus.integrations.transformers import preserve

Masks = dict[str, dict[int, Tensor]]
"""By the name of a parameter and the first of the coordinates: the masks of all steps."""
STEPS, HALF, EPOCH, MICRO, ACCUMULATION, CLIP, LR = 50, 25, 10, 4, 2, 0.5, 1e-3
PAST: dict[str, Any] = {
    "anchors": tiny.rows(5, seed=1),
    "probes": tiny.rows(17, seed=2),
    "anchor_weight": 0.3,
    "ema": "float32",
}
NEW = tiny.rows(EPOCH * MICRO * ACCUMULATION, seed=4)
EMBEDDING = "model.embed_tokens.weight"
ONLY = {EMBEDDING: [3, 19, 20, 38, 39]}


def quiet() -> Any:
    """DeepSpeed without its compiled communication, which takes minutes to build, and without its log."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    vars(deepspeed.ops)["__compatible_ops__"] = {}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only: two groups, hence several partitions."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]


def config(stage: int, **changes: Any) -> dict[str, Any]:
    third = {"sub_group_size": 1000, "stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": MICRO // 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, **third},
        **changes,
    }


def start(stage: int, model: nn.Module | None = None, **changes: Any) -> tuple[Any, Any]:
    """An engine and its optimizer."""
    model = model or tiny.lm()
    engine, optimizer, *_ = quiet().initialize(
        model=model, optimizer=AdamW(groups(model), lr=LR), config=config(stage, **changes)
    )
    return engine, optimizer


def train(engine: Any, guard: Guard, first: int, last: int) -> None:
    """Steps `first` to `last`, each process on its share of every micro-batch."""
    for step in range(first, last + 1):
        if (step - 1) % EPOCH == 0:
            guard.refresh()
        for rows in micro_batches(step):
            engine.backward(answer_losses(engine, guard.engine.rows(rows)).mean())
            engine.step()


def micro_batches(step: int) -> list[list[Encoded]]:
    at = (step - 1) % EPOCH * MICRO * ACCUMULATION
    return [NEW[at + k * MICRO :][:MICRO] for k in range(ACCUMULATION)]


def plain(steps: int = STEPS, **changes: Any) -> tuple[list[Tensor], Masks]:
    """The same updates in one process without DeepSpeed."""
    model = tiny.lm()
    optimizer = AdamW(groups(model), lr=LR)
    guard = protect(optimizer, model, **PAST, **changes)
    masks = watched(guard)
    for step in range(1, steps + 1):
        if (step - 1) % EPOCH == 0:
            guard.refresh()
        optimizer.zero_grad()
        for rows in micro_batches(step):
            (answer_losses(model, rows).mean() / ACCUMULATION).backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return [p.detach() for p in model.parameters()], masks()


def plain_for_trainer(epochs: int) -> tuple[list[Tensor], Masks]:
    """What Trainer should do with the rows of `trained`, batches of four and clipping."""
    model = tiny.lm()
    optimizer = AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    guard = protect(optimizer, model, anchors=trained.ANCHORS, probes=trained.PROBES, ema="float32")
    masks = watched(guard)
    for _ in range(epochs):
        guard.refresh()
        for first in range(0, len(trained.NEW), 4):
            optimizer.zero_grad()
            answer_losses(model, trained.NEW[first : first + 4]).mean().backward()
            clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
    return [p.detach() for p in model.parameters()], masks()


def watched(guard: Guard) -> Callable[[], Masks]:
    """Note every mask from now on, by the parameters' own names and coordinates."""
    seen: dict[tuple[str, int], list[Tensor]] = {}

    def see(position: int, proposal: Proposal, _: Tensor) -> None:
        mask = (proposal.sign.sign() * proposal.delta.sign() <= 0).flatten()
        if not hasattr(guard.engine, "fragments"):
            seen.setdefault((guard.names[id(guard.params[position])], 0), []).append(mask)
            return
        for f in guard.engine.fragments:
            if f.partition == position:
                seen.setdefault((f.name, f.start), []).append(mask[f.offset : f.offset + f.size].clone())

    def collected() -> Masks:
        found: Masks = {}
        for (name, first), masks in seen.items():
            found.setdefault(name, {})[first] = torch.stack(masks)
        return found

    guard.observers.append(see)
    return collected


def whole(model: nn.Module) -> list[Tensor]:
    """Every parameter; ZeRO 3 gathers it first."""
    import deepspeed

    found = []
    for p in model.parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_tensor")):
            found.append(p.detach().clone())
    return found


class Watch(TrainerCallback):  # type: ignore[misc]
    """Notes the masks of the guard that a callback before it attaches."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.masks = watched(self.callback.guard)


def trainer(stage: int, folder: Path, epochs: int, **changes: Any) -> tuple[Any, Watch]:
    """A protected Trainer under ZeRO that accumulates two rows in each of two processes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    settings = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": epochs,
        "learning_rate": LR,
        "max_grad_norm": CLIP,
        "deepspeed": config(
            stage, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto", gradient_clipping="auto"
        ),
    }
    run = trained.trainer(folder, **settings | changes)
    watch = Watch(preserve(run, anchors=trained.ANCHORS, probes=trained.PROBES, ema="float32"))
    run.add_callback(watch)
    return run, watch
