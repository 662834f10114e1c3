"""Seq2SeqTrainer: past batches with the model's own loss.    python examples/seq2seq_trainer.py"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

from cplus.integrations.transformers import preserve


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Random sentences and their translations."""
    draw = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(1, 40, (count, width), generator=draw) for width in (8, 5))
    return [{"input_ids": i, "labels": l} for i, l in zip(ids, labels, strict=True)]  # noqa: E741


def build(**changes: Any) -> tuple[Seq2SeqTrainer, dict[str, Any]]:
    """A trainer of new rows, and past batches with the model's own loss as evidence."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=40, **sizes))
    settings = {"output_dir": tempfile.mkdtemp(), "report_to": "none", "save_strategy": "no", "use_cpu": True}
    args = Seq2SeqTrainingArguments(**(settings | {"learning_rate": 1e-3} | changes))
    trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=rows(16, 1), eval_dataset=rows(8, 2))
    past = list(torch.utils.data.DataLoader(rows(16, 3), batch_size=8))
    return trainer, {"evidence": [(1.0, past, lambda model, batch: model(**batch).loss)]}


if __name__ == "__main__":
    trainer, evidence = build()
    preserve(trainer, **evidence)  # +
    trainer.train()
