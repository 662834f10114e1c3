"""transformers.Trainer; one line makes it CPLUS.    python examples/trainer.py"""

from __future__ import annotations

from material import arguments, material
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from cplus.integrations.transformers import preserve


def main() -> dict[str, float]:
    """Learn new rows and keep the known ones."""
    options = arguments()
    data = material(options)
    data.report("before", data.model)
    trainer = Trainer(
        model=data.model,
        args=TrainingArguments(
            output_dir=options.out,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.batch,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            logging_steps=3,
            save_strategy="epoch",
            save_total_limit=1,
            report_to="none",
        ),
        train_dataset=[row.features() for row in data.new],
        data_collator=DataCollatorForSeq2Seq(data.tokenizer),
    )
    preserve(trainer, anchors=data.anchors, probes=data.probes)  # +
    trainer.train()
    return data.report("after", trainer.model)


if __name__ == "__main__":
    main()
