"""A small job on the built-in model: a few untaught facts to learn, a few taught ones to keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import cplus
from cplus.data.examples import Example, to_row
from cplus.jobs.checkpoint import Checkpoints
from cplus.jobs.settings import AdaptConfig, settings
from cplus.methods.table import method
from cplus.toy import world
from cplus.training.driver import Training


def write_rows(path: Path, examples: list[Example]) -> Path:
    """Examples as a JSONL file."""
    path.write_text("".join(json.dumps(to_row(example)) + "\n" for example in examples), encoding="utf-8")
    return path


def write_files(folder: Path) -> None:
    """`new.jsonl`, `keep.jsonl` and `past.jsonl`, read by the cloze interface."""
    known = world.taught("harbours")
    write_rows(folder / "new.jsonl", list(world.untaught("harbours")[:12]))
    write_rows(folder / "keep.jsonl", list(known[:4]))
    write_rows(folder / "past.jsonl", list(known[4:28]))


def asked(folder: Path, **changes: Any) -> AdaptConfig:
    """Settings of a job of seconds; three epochs of three updates."""
    values: dict[str, Any] = {
        "model": "toy",
        "new": str(folder / "new.jsonl"),
        "anchors": str(folder / "keep.jsonl"),
        "past": str(folder / "past.jsonl"),
        "interface": "cloze",
        "out": folder / "out",
        "num_probes": 8,
        "epochs": 3,
        "batch_size": 4,
        "lr": 1e-3,
        "stop": "never",
        "lr_schedule": "cosine",
        "warmup_steps": 2,
        "evaluate_rows": 8,
        "device": "cpu",
    }
    if not method(str(changes.get("method", "cplus"))).needs_bank:
        del values["num_probes"]
    return settings(values | changes)


def written(out: Path) -> dict[str, torch.Tensor]:
    """The weights of a finished job."""
    return AutoModelForCausalLM.from_pretrained(out / "model").state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two models have the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def stop_at(step: int | None, config: Any, run: Callable[[Any], object] = cplus.adapt) -> None:
    """Run the job until it fails just after the checkpoint of this update; None: when the whole training is done."""
    real = Checkpoints.save

    def save(self: Checkpoints, training: Training) -> None:
        real(self, training)
        if training.log.done if step is None else training.log.cursor.step == step:
            raise OSError("the power went out")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", save)
        with pytest.raises(OSError, match="power"):
            run(config)
