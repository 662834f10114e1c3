"""The script that a page's fragments are put into: the names a reader has before the first block."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cplus

ROOT = Path(__file__).parent.parent
KIND: dict[str, Any] = {"interface": "cloze", "chat": False}


def training() -> dict[str, Any]:
    """A model, its rows as tokens and a Trainer's arguments; its rate of 0 keeps the model that the bank is for."""
    import torch
    from transformers import DataCollatorForSeq2Seq, EarlyStoppingCallback, Trainer, TrainingArguments

    from cplus import models
    from cplus.data import interfaces
    from cplus.toy import world

    base = models.load("toy")
    model, tokenizer = base.model, base.tokenizer
    keep, new = world.taught("harbours")[:4], world.untaught("harbours")[:8]
    bank = cplus.probe(model, tokenizer, keep, num_probes=4, banks=Path("sealed"), **KIND)
    shutil.copytree(next(path.parent for path in Path("sealed").rglob("manifest.json")), "banks/mine")
    rows = [row.features() for row in cplus.encode(new, tokenizer, **KIND)]
    return {
        "torch": torch,
        "Trainer": Trainer,
        "TrainingArguments": TrainingArguments,
        "EarlyStoppingCallback": EarlyStoppingCallback,
        "model": model,
        "tokenizer": tokenizer,
        "interface": interfaces.build("cloze", tokenizer),
        "anchors": cplus.encode(keep, tokenizer, **KIND),
        "probes": cplus.encode(bank.examples, tokenizer, **KIND),
        "rows": rows,
        "tokenised_rows": rows,
        "held_out": rows[:2],
        "held_out_rows": cplus.encode(keep[:2], tokenizer, **KIND),
        "loader": torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=DataCollatorForSeq2Seq(tokenizer)),
        "epochs": 1,
        "args": TrainingArguments("run", max_steps=2, per_device_train_batch_size=1, learning_rate=0.0, report_to=[]),
    }


def arrays() -> dict[str, Any]:
    """Parameters and gradients in JAX."""
    import jax.numpy as jnp
    import optax

    ones = {"w": jnp.ones(3)}
    return {"optax": optax, "params": ones, "gradient": ones, "g_anchor": ones, "g_probe": ones}


def results() -> dict[str, Any]:
    """The clone's records of the studies, as a reader in the clone has them; what is written goes elsewhere."""
    Path("results").mkdir()
    Path("results/desk").symlink_to(ROOT / "results" / "desk")
    return {}


ASSUMED = {
    "docs/integrations.md": (training, arrays),
    "docs/studies.md": (results,),
}


def assumed(page: str) -> dict[str, Any]:
    """What the page's first block may use."""
    names: dict[str, Any] = {}
    for part in ASSUMED.get(page, ()):
        names |= part()
    return names
