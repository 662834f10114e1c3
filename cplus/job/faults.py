"""What is wrong with settings, in sentences; the names that other trainers have for ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

OTHER_NAMES = {
    "learning_rate": "lr", "lr_scheduler": "lr_schedule", "lr_scheduler_type": "lr_schedule", "optim": "optimizer",
    "num_train_epochs": "epochs", "num_epochs": "epochs", "max_epochs": "epochs",
    "per_device_train_batch_size": "batch_size", "train_batch_size": "batch_size", "micro_batch_size": "batch_size",
    "gradient_accumulation_steps": "batch_size", "warmup_ratio": "warmup_steps", "max_grad_norm": "clip_norm",
    "output_dir": "out", "output": "out", "train_file": "new", "train_data": "new", "dataset": "new", "data": "new",
    "dataset_name": "new", "dataset_path": "new", "data_path": "new", "model_name": "model",
    "model_name_or_path": "model", "base_model": "model", "bf16": "compute_dtype", "fp16": "compute_dtype",
    "dtype": "compute_dtype", "torch_dtype": "compute_dtype", "lora_r": "lora", "lora_rank": "lora",
    "lora_alpha": "lora", "use_peft": "lora", "random_seed": "seed", "eval_steps": "evaluate_every",
    "eval_strategy": "evaluate_every", "evaluation_strategy": "evaluate_every", "save_steps": "checkpoint_steps",
    "max_seq_length": "max_length", "max_seq_len": "max_length", "sequence_len": "max_length",
    "load_in_4bit": "load", "quantization_bit": "load", "cutoff_len": "max_length", "truncation": "too_long",
}  # fmt: skip
"""The names of our settings in other trainers."""


def sentences(error: ValidationError, names: Iterable[str]) -> str:
    """Every fault that the schema found; a misspelt name is answered with the nearest of `names`."""
    known = list(names)
    return "; ".join(_fault(fault, known) for fault in error.errors())


def _fault(fault: Mapping[str, Any], names: list[str]) -> str:
    name = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        near = [OTHER_NAMES[name]] if name in OTHER_NAMES else difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "'cplus config --schema' lists all settings"
        return f"{name!r} is not a setting; {hint}"
    if fault["type"] == "missing":
        return f"{name} is missing"
    if fault["type"] == "value_error":  # our own sentences
        message = str(fault["msg"]).removeprefix("Value error, ")
        return f"{name}: {message}" if name else message
    message = str(fault["msg"]).partition(" for <class")[0]
    message = message.replace("Input should be", "must be").replace("Input is not", "must be")
    return f"{name} {message}, got {fault['input']!r:.60}"
