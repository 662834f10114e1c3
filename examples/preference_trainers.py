"""TRL's DPO, KTO and GRPO trainers; the evidence keeps its own loss, cross-entropy.

python examples/preference_trainers.py dpo|kto|grpo
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer

import cplus
from cplus import models
from cplus.data.tasks import load_task
from cplus.integrations.transformers import preserve
from cplus.toy.world import prompt


def short(completions: list[str], **_: Any) -> list[float]:
    """Reward short answers."""
    return [-float(len(completion)) for completion in completions]


def build(kind: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """A trainer on pairs of answers, on right and wrong ones or on its own samples, and known facts as anchors."""
    base, facts = models.load("toy"), list(load_task("harbours").examples)[:24]
    settings = {"output_dir": tempfile.mkdtemp(), "report_to": "none", "save_strategy": "no", "use_cpu": True}
    settings |= {"bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-3} | changes
    rows: list[dict[str, Any]] = [{"prompt": prompt(f.question)} for f in facts[:16]]
    for i, (row, f) in enumerate(zip(rows, facts, strict=False)):
        if kind == "dpo":
            row |= {"chosen": f" {f.right}", "rejected": f" {f.choices[f.answer - 1]}"}
        if kind == "kto":
            row |= {"completion": f" {f.choices[f.answer - i % 2]}", "label": i % 2 == 0}
    given = {"model": base.model, "processing_class": base.tokenizer}
    if kind == "dpo":
        trainer: Any = DPOTrainer(args=DPOConfig(**settings), train_dataset=Dataset.from_list(rows), **given)
    elif kind == "kto":
        trainer = KTOTrainer(args=KTOConfig(**settings), train_dataset=Dataset.from_list(rows), **given)
    else:
        args = GRPOConfig(**({"max_completion_length": 6, "num_generations": 4} | settings))
        trainer = GRPOTrainer(reward_funcs=short, args=args, train_dataset=Dataset.from_list(rows[:4]), **given)
    return trainer, {"anchors": cplus.encode(facts[16:], base.tokenizer, interface="cloze")}


if __name__ == "__main__":
    trainer, evidence = build(sys.argv[1])
    preserve(trainer, **evidence)  # +
    trainer.train()
