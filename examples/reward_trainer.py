"""TRL's RewardTrainer; past comparisons with their own loss as evidence.    python examples/reward_trainer.py"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForSequenceClassification
from trl import RewardConfig, RewardTrainer

from cplus import models
from cplus.integrations.transformers import preserve


def compared(model: torch.nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """How far the model is from preferring the first text of each pair."""
    return -F.logsigmoid(model(pair[0]).logits - model(pair[1]).logits).mean()


def build(**changes: Any) -> tuple[RewardTrainer, dict[str, Any]]:
    """A trainer on new comparisons, and past ones as evidence."""
    torch.manual_seed(0)
    tokenizer, sizes = models.load("toy").tokenizer, {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    model = Qwen3ForSequenceClassification(Qwen3Config(vocab_size=len(tokenizer), num_labels=1, **sizes))
    settings = {"output_dir": tempfile.mkdtemp(), "report_to": "none", "save_strategy": "no", "use_cpu": True}
    args = RewardConfig(**(settings | {"bf16": False, "gradient_checkpointing": False} | changes))
    data = Dataset.from_list([{"chosen": f"The {i} th answer", "rejected": f"No answer {i}"} for i in range(16)])
    trainer = RewardTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    past = [(torch.randint(1, 40, (4, 8)), torch.randint(1, 40, (4, 8))) for _ in range(2)]
    return trainer, {"evidence": [(1.0, past, compared)]}


if __name__ == "__main__":
    trainer, evidence = build()
    preserve(trainer, **evidence)  # +
    trainer.train()
