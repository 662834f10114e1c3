"""TRL's SFTTrainer on prompts and completions; one line makes it CPLUS.    python examples/sft_trainer.py"""

from __future__ import annotations

from datasets import Dataset
from material import arguments, material
from trl import SFTConfig, SFTTrainer

from cplus.integrations.transformers import preserve
from cplus.toy.world import prompt


def main() -> dict[str, float]:
    """Learn new rows and keep the known ones."""
    options = arguments()
    data = material(options)
    data.report("before", data.model)
    rows = [{"prompt": prompt(fact.question), "completion": f" {fact.right}\n\n"} for fact in data.unknown]
    args = SFTConfig(
        output_dir=options.out,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        save_strategy="no",
        report_to="none",
    )
    dataset = Dataset.from_list(rows)
    trainer = SFTTrainer(model=data.model, args=args, train_dataset=dataset, processing_class=data.tokenizer)
    preserve(trainer, anchors=data.anchors, probes=data.probes)  # +
    trainer.train()
    return data.report("after", trainer.model)


if __name__ == "__main__":
    main()
