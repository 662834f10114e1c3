"""TRL's DPOTrainer; the evidence keeps its own loss, cross-entropy.    python examples/dpo_trainer.py"""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

import cplus
from cplus import models
from cplus.data.tasks import load_task
from cplus.integrations.transformers import preserve
from cplus.toy.world import prompt


def build(**changes: Any) -> tuple[DPOTrainer, dict[str, Any]]:
    """A trainer on pairs of answers, and known facts as anchors."""
    base, facts = models.load("toy"), list(load_task("harbours").examples)[:24]
    rows = [
        {"prompt": prompt(f.question), "chosen": f" {f.right}", "rejected": f" {f.choices[f.answer - 1]}"}
        for i, f in enumerate(facts[:16])
    ]
    settings = {"output_dir": tempfile.mkdtemp(), "report_to": "none", "save_strategy": "no", "use_cpu": True}
    args = DPOConfig(**(settings | {"bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-3} | changes))
    data = Dataset.from_list(rows)
    trainer = DPOTrainer(model=base.model, args=args, train_dataset=data, processing_class=base.tokenizer)
    return trainer, {"anchors": cplus.encode(facts[16:], base.tokenizer, interface="cloze")}


if __name__ == "__main__":
    trainer, evidence = build()
    preserve(trainer, **evidence)  # +
    trainer.train()
