"""TRL's GRPOTrainer; the evidence keeps its own loss, cross-entropy.    python examples/grpo_trainer.py"""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import cplus
from cplus import models
from cplus.data.tasks import load_task
from cplus.integrations.transformers import preserve
from cplus.toy.world import prompt


def short(completions: list[str], **_: Any) -> list[float]:
    """Reward short answers."""
    return [-float(len(completion)) for completion in completions]


def build(**changes: Any) -> tuple[GRPOTrainer, dict[str, Any]]:
    """A trainer that samples answers and is rewarded for short ones, and known facts as anchors."""
    base, facts = models.load("toy"), list(load_task("harbours").examples)[:24]
    settings = {"output_dir": tempfile.mkdtemp(), "report_to": "none", "save_strategy": "no", "use_cpu": True}
    settings |= {"bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-3, "max_completion_length": 6}
    args = GRPOConfig(**(settings | {"num_generations": 4} | changes))
    data = Dataset.from_list([{"prompt": prompt(f.question)} for f in facts[:4]])
    trainer = GRPOTrainer(base.model, short, args=args, train_dataset=data, processing_class=base.tokenizer)
    return trainer, {"anchors": cplus.encode(facts[16:], base.tokenizer, interface="cloze")}


if __name__ == "__main__":
    trainer, evidence = build()
    preserve(trainer, **evidence)  # +
    trainer.train()
