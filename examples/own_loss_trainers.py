"""Trainer on a classifier, and Seq2SeqTrainer: past batches with the model's own loss.

python examples/own_loss_trainers.py classification|seq2seq
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from cplus.integrations.transformers import preserve


def rows(count: int, seed: int, classes: bool) -> list[dict[str, Tensor]]:
    """Random sentences, and their classes or translations."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 40, (count, 8), generator=draw)
    labels = torch.randint(3, (count,), generator=draw) if classes else torch.randint(1, 40, (count, 5), generator=draw)
    return [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]


def build(kind: str, **changes: Any) -> tuple[hf.Trainer, dict[str, Any]]:
    """A trainer of new rows, and past batches with the model's own loss as evidence."""
    torch.manual_seed(0)
    settings = {"output_dir": tempfile.mkdtemp(), "report_to": "none", "save_strategy": "no", "use_cpu": True}
    settings |= {"learning_rate": 1e-3} | changes
    if classes := kind == "classification":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        model: Any = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=40, num_labels=3, **sizes))
        trainer, args = hf.Trainer, hf.TrainingArguments(**settings)
    else:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
        model = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=40, **sizes))
        trainer, args = hf.Seq2SeqTrainer, hf.Seq2SeqTrainingArguments(**settings)
    past = list(torch.utils.data.DataLoader(rows(16, 3, classes), batch_size=8))
    made = trainer(model=model, args=args, train_dataset=rows(16, 1, classes), eval_dataset=rows(8, 2, classes))
    return made, {"evidence": [(1.0, past, lambda model, batch: model(**batch).loss)]}


if __name__ == "__main__":
    trainer, evidence = build(sys.argv[1])
    preserve(trainer, **evidence)  # +
    trainer.train()
