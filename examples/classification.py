"""transformers.Trainer on a classifier: past batches with the model's own loss.    python examples/classification.py"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from cplus.integrations.transformers import preserve


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Random sentences and classes."""
    draw = torch.Generator().manual_seed(seed)
    ids, classes = torch.randint(40, (count, 8), generator=draw), torch.randint(3, (count,), generator=draw)
    return [{"input_ids": i, "labels": c} for i, c in zip(ids, classes, strict=True)]


def build(**changes: Any) -> tuple[Trainer, dict[str, Any]]:
    """A trainer of new rows, and past batches with the model's own loss as evidence."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=3, **sizes))
    settings = {"output_dir": tempfile.mkdtemp(), "report_to": "none", "save_strategy": "no", "use_cpu": True}
    args = TrainingArguments(**(settings | {"learning_rate": 1e-3} | changes))
    trainer = Trainer(model=model, args=args, train_dataset=rows(16, 1), eval_dataset=rows(8, 2))
    past = list(torch.utils.data.DataLoader(rows(16, 3), batch_size=8))
    return trainer, {"evidence": [(1.0, past, lambda model, batch: model(**batch).loss)]}


if __name__ == "__main__":
    trainer, evidence = build()
    preserve(trainer, **evidence)  # +
    trainer.train()
