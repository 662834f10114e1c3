"""One schema for jobs and repairs: the command line, YAML files and Python use the same names."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from cplus.data.formats import check_once
from cplus.data.readers import parse_columns, weighted
from cplus.evaluation.abilities import BRIEF, CODE, GENERAL, KEPT, MEASURED, STOPPING
from cplus.evaluation.abilities import chosen as measured_abilities
from cplus.evaluation.judges import NAMES
from cplus.evaluation.requirements import ABILITY, Requirement, parse
from cplus.methods.table import Method
from cplus.models.names import PRESETS
from cplus.training.settings import Positive, TrainSettings

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


def unknown(name: str, names: list[str]) -> str:
    """A name that is no setting, answered with the nearest that is one."""
    if name == "micro_batches":  # jobs of earlier versions have it
        return "'micro_batches' is gone: the processes divide each batch; remove it, and begin a stopped job again"
    near = [OTHER_NAMES[name]] if OTHER_NAMES.get(name) in names else difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "'cplus adapt --schema' lists all settings"
    return f"{name!r} is not a setting; {hint}"


def _fault(fault: Mapping[str, Any], names: list[str]) -> str:
    name = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        return unknown(name, names)
    if fault["type"] == "missing":
        return f"{name} is missing"
    if fault["type"] == "value_error":  # our own sentences
        message = str(fault["msg"]).removeprefix("Value error, ")
        return f"{name}: {message}" if name else message
    message = str(fault["msg"]).partition(" for <class")[0]
    message = message.replace("Input should be", "must be").replace("Input is not", "must be")
    return f"{name} {message}, got {fault['input']!r:.60}"


def refuse(*cases: tuple[bool, str]) -> None:
    """Raise the sentence of the first case that is true."""
    for wrong, sentence in cases:
        if wrong:
            raise ValueError(sentence)


# The setting `keep`: what a job keeps, by name or as a file, each with its share.


NONE = "none"
EXPECTED = f"{', '.join(KEPT)}, a file of rows, or {NONE}; several with weights, like general=0.7"


def parse_keep(text: str) -> tuple[str, float]:
    """What to keep and its weight: an ability, a file or `none`, as `general`, `json=0.3` or `keep.jsonl=0.5`.

    >>> parse_keep("general=0.7"), parse_keep("rows.jsonl")
    (('general', 0.7), ('rows.jsonl', 1.0))
    """
    name, mark, number = text.strip().rpartition("=")
    try:
        kept = (name, float(number)) if mark else (number, 1.0)
    except ValueError:
        kept = ("", 1.0)
    if not kept[0] or not (math.isfinite(kept[1]) and kept[1] > 0):
        raise ValueError(f"expected {EXPECTED}, each with a weight above 0, got {text!r}")
    return kept


def files_to_keep(entries: Iterable[tuple[str, float]]) -> list[str]:
    """The files among the entries; their rows are anchors."""
    return [name for name, _ in entries if name not in (*KEPT, NONE)]


def shares(entries: Sequence[tuple[str, float]], *, anchors: bool) -> dict[str, float]:
    """The share of each ability that the base model writes itself; the rest is the anchors' share.

    >>> shares([("general", 0.7), ("json", 0.3)], anchors=False), shares([("general", 1.0)], anchors=True)
    ({'general': 0.7, 'json': 0.3}, {'general': 0.5})
    """
    names = [name for name, _ in entries]
    if len(set(names)) < len(names):
        raise ValueError(f"expected each thing to keep once, got {max(names, key=names.count)} more than once")
    if NONE in names:
        if len(names) > 1:
            raise ValueError(f"{NONE} keeps nothing; leave it out beside {' and '.join(names)}")
        return {}
    files = files_to_keep(entries)
    total = sum(weight for _, weight in entries) + float(anchors and not files)
    return {name: weight / total for name, weight in entries if name not in files}


def allotted(count: int, weights: Mapping[str, float]) -> dict[str, int]:
    """A number of rows by shares that sum to at most 1, to the largest remainders first.

    >>> allotted(8, {"general": 0.7, "json": 0.3}), allotted(5, {"general": 0.5})
    ({'general': 6, 'json': 2}, {'general': 3})
    """
    whole = round(count * sum(weights.values()) + 1e-9)
    found = {name: int(count * weight) for name, weight in weights.items()}
    order = sorted(weights, key=lambda name: found[name] - count * weights[name])
    for name in order[: whole - sum(found.values())]:
        found[name] += 1
    return found


CHOSEN = ("lr", "epochs", "evaluate_every", "compute_dtype", "gradient_checkpointing")
"""Settings that choose themselves where they are not given."""


def _checked(reader: Callable[[Any], object]) -> AfterValidator:
    """A value that this reader accepts."""

    def check(value: Any) -> Any:
        reader(value)
        return value

    return AfterValidator(check)


def _stop(value: str) -> None:
    """`learned`, `never`, or `lost:0.02`."""
    number = re.fullmatch(r"lost:(\d*\.?\d+(?:e-?\d+)?)", value)
    if value not in ("learned", "never") and (number is None or float(number[1]) == 0):
        raise ValueError(f"expected learned, never or lost:LIMIT with a limit above 0, like lost:0.02, got {value!r}")


def _abilities(value: tuple[str, ...]) -> tuple[str, ...]:
    """Names of abilities, also several with commas between them."""
    names = tuple(name.strip() for text in value for name in text.split(","))
    measured_abilities(names)
    return names


def _new(value: object) -> object:
    """One file as its name, several as a tuple; a weight is checked here."""
    given = [value] if isinstance(value, str) else value
    if given is None:
        return None
    if not isinstance(given, list | tuple) or not given or not all(isinstance(text, str) for text in given):
        raise ValueError(f"expected a file or a list of files, each with a weight if wanted, got {value!r:.60}")
    for text in given:
        weighted(text)
    return given[0] if len(given) == 1 else tuple(given)


SELF_WRITTEN_PROBES = 16
"""Probes beside 8 anchors where the model writes both: 24 rows of evidence, a third of an epoch of 60 new rows."""


class AdaptConfig(TrainSettings):
    """Everything that decides a job. Unknown names are refused."""

    model: str = Field(description="Model to adapt: alias, hub id, folder or GGUF file.")
    out: Path = Field(Path("out"), description="Output folder.")

    new: Annotated[str | tuple[str, ...] | None, BeforeValidator(_new)] = Field(
        None,
        description="New rows to learn: a file, a named task or owner/name on the hub. Repeatable, with weights: "
        "b.jsonl=0.5 uses half of its rows, b.jsonl=2 each row twice per epoch.",
    )
    anchors: str | None = Field(None, description="Rows the model must keep, used as evidence: a file or a named task.")
    keep: tuple[Annotated[str, _checked(parse_keep)], ...] = Field(
        (),
        description=f"What to keep: {', '.join(KEPT)} (general by default without anchors), written by the base model "
        "itself and measured; a file of rows (as anchors); none. Several with weights, like general=0.7. Repeatable.",
    )
    past: str | None = Field(
        None,
        description="Held-out past rows to measure Retention on; default: 28 self-written ones, or the anchors given.",
    )
    validation: str | None = Field(
        None,
        description="Held-out new rows to measure learning on: a file or a task; none for none. Default: a tenth of 50 "
        "or more new rows, drawn by the seed.",
    )
    kept: tuple[Path, ...] = Field(
        (), description="Finished job whose anchors and bank are protected as one more past task; repeatable."
    )
    split: str | None = Field(
        None, description="Task to split by the base model's answers: correct rows are past, incorrect rows are new."
    )
    num_anchors: Positive = Field(
        8, description="With split or self-written rows: number of anchors to draw from them (A)."
    )
    num_new: Positive | None = Field(None, description="With split: number of new rows to learn; default: all.")
    external: tuple[str, ...] = Field((), description="Other task to evaluate before and after; repeatable.")
    external_limit: Positive | None = Field(200, description="Maximum number of rows per external task.")
    interface: Literal["letter", "cloze", "freeform"] | None = Field(
        None, description="Multiple choice by letter or cloze; default: the task's own. Other rows are freeform."
    )
    plain: bool = Field(False, description="Use plain prompts, without the chat template.")
    own_answers: bool = Field(
        False, description="Free text: replace the answers of anchors and past rows by the base model's own."
    )
    judge: str = Field("none", description=f"How free text is judged: {NAMES}. none: by losses and changed answers.")
    turns: Literal["all", "last"] = Field("all", description="Conversations: assistant turns to learn.")
    thinking: Literal["off", "keep"] = Field(
        "off", description="Thinking models: train and evaluate without thinking, or keep it in free text."
    )
    columns: Annotated[
        dict[str, str] | None, BeforeValidator(lambda value: parse_columns(value) if isinstance(value, str) else value)
    ] = Field(None, description="Names of the columns where they differ: prompt=question,response=answer.")
    chat_template: Path | None = Field(None, description="File with a chat template to use instead of the model's.")
    max_new_tokens: Positive = Field(
        256,
        description="Free text: maximum number of tokens per answer; unjudged answers to new rows also end at "
        "twice the longest response.",
    )
    max_length: Positive | None = Field(
        None, description="Maximum number of tokens per row; default: the model's context window."
    )
    too_long: Literal["refuse", "exclude", "truncate"] = Field(
        "refuse",
        description="What to do with rows longer than that. truncate: cut the beginning of the prompt, never the "
        "answer.",
    )
    data_dir: Path | None = Field(None, description="Folder of the named tasks; default: CPLUS_DATA, then the hub.")

    preset: Literal["user", "paper"] = Field(
        "user",
        description="paper: batch size 1, file order, constant rate 1e-6, 25 epochs, weight decay 0.1, 512 probes.",
    )
    bank: Path | None = Field(
        None, description="Sealed probe bank to use; default: build one, or reuse it from the cache."
    )
    repair: bool = Field(
        False, description="After training, undo the changes that anchors and probes need most and the new rows least."
    )

    stop: Annotated[str, _checked(_stop)] = Field(
        "learned",
        description="learned: stop after the first epoch in which every new row is correct. never: run all epochs. "
        "lost:0.02: as learned, and stop before past rows lose 0.02 (nats per token, or share of Retention).",
    )
    load: Literal["float32", "4bit"] = Field(
        "float32", description="Precision of the base model in memory; 4bit trains adapters alone (lora)."
    )

    max_asked: Positive = Field(
        500, description="Free text: maximum number of rows per set to evaluate, because generation is slow."
    )
    evaluate_every: int = Field(
        1,
        ge=0,
        description="Epochs between evaluations during training; 0 for none; default: 1, more where the epochs of free "
        "text are chosen.",
    )
    evaluate_rows: Positive = Field(64, description="Rows per evaluation during training; the final one uses all.")
    require: tuple[Annotated[str, _checked(parse)], ...] = Field(
        (),
        description="retention>=0.9, acquisition>=0.9, past-loss<=+0.05, new-loss<=1 or everyday>=-10 (points); exit "
        "code 2 if its 95 % bound misses it. Repeatable.",
    )
    keep_best: bool | None = Field(
        None,
        description="Write the weights of the epoch with the lowest loss of held-out new rows, not the last; default: "
        "in free text with held-out rows. Without such rows: of the best figures on past and new rows.",
    )
    abilities: Annotated[tuple[str, ...], AfterValidator(_abilities)] = Field(
        BRIEF,
        description="What to measure before and after on short built-in requests, beside what is kept by name: "
        f"{', '.join(MEASURED)}; none for nothing. They are never trained on.",
    )
    save_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Precision of the written weights; training stays in float32."
    )
    compare: Annotated[Literal["sft"] | None, BeforeValidator(lambda value: value or None)] = Field(
        None,
        description="After the job, train plain fine-tuning (sft) on the same rows to the same loss of held-out rows, "
        "and show both in the receipt.",
    )
    report_to: Literal["tensorboard", "wandb", "trackio"] | None = Field(
        None, description="Tracker that the training curves are also logged to."
    )
    checkpoint_minutes: float = Field(10.0, gt=0, description="Minutes between checkpoints.")
    checkpoint_steps: Positive | None = Field(
        None, description="Updates between checkpoints, in addition to the minutes."
    )

    device: str = Field("auto", description="Device: auto, cuda, mps or cpu.")
    sharding: Literal["fsdp", "ddp"] = Field(
        "fsdp",
        description="Several processes (torchrun): fsdp splits weights, optimizer and gate over them, ddp copies them.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a model on the hub.")
    trust_remote_code: bool = Field(False, description="Allow code from the model's hub repository to run.")

    if not TYPE_CHECKING:  # type checkers read the names and types of the fields

        def __init__(self, /, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ValueError(sentences(error, type(self).model_fields)) from error

    @model_validator(mode="before")
    @classmethod
    def _presets(cls, values: Any) -> Any:
        """Values of a preset; values that are given override them. A file to keep is a file of anchors."""
        if not isinstance(values, dict):
            return values
        if values.get("preset") == "paper":
            values = {**paper(values.get("model")), **values}
        kept = values.get("keep")
        kept = (kept,) if isinstance(kept, str) else kept
        if not isinstance(kept, list | tuple) or not all(isinstance(text, str) for text in kept):
            return values
        found = files_to_keep(parse_keep(text) for text in kept)
        if len(found) > 1:
            raise ValueError(f"expected one file to keep, got {' and '.join(found)}; put their rows into one file")
        if found and values.get("anchors") not in (None, found[0]):
            raise ValueError(
                f"a file to keep is a file of anchors: expected {found[0]} or {values['anchors']}, not both"
            )
        return {**values, "keep": tuple(kept), **({"anchors": found[0]} if found else {})}

    @model_validator(mode="after")
    def _whole(self) -> AdaptConfig:
        if (self.new is None) == (self.split is None):
            raise ValueError("expected either new (rows to learn) or split (a task to split), and not both")
        if self.split is not None and (self.anchors is not None or self.past is not None):
            raise ValueError("split draws anchors and past rows itself; leave out anchors and past, or provide new")
        if self.repair and self.split is None and self.anchors is None and not self.kept and not self.written:
            raise ValueError("repair needs rows the model should keep; provide anchors or keep")
        if self.repair and self.lora is not None and not self.lora.merge:
            raise ValueError("repair works on the model's own weights; leave out merge=false, or repair")
        if self.load == "4bit":
            if self.lora is None:
                raise ValueError("load 4bit trains adapters alone, as 4 bits hold no small update; add lora, as r=16")
            if not self.lora.merge and self.save_dtype != "float32":
                raise ValueError(f"adapters written apart stay float32; leave out save_dtype, got {self.save_dtype}")
        written = self.written
        if written and self.split is not None:
            raise ValueError("split draws the rows to keep itself; leave out keep, or provide new")
        if written and self.bank is not None:
            raise ValueError(
                "a bank belongs to the anchors it was written from, and here the model writes its own; provide anchors"
            )
        measured = {*self.measured, *self.abilities, STOPPING} if self.measured else set()
        for own in self.requirements:
            if own.metric in ABILITY and own.metric not in measured:
                raise ValueError(f"{own} needs the ability {own.metric} to be measured; name it in abilities")
        if self.lost_limit is not None and self.evaluate_every == 0:
            raise ValueError(f"stop {self.stop} needs evaluations during training; set evaluate_every to at least 1")
        return self

    @property
    def row(self) -> Method:
        """The method's row; the gate's average takes one byte where nothing else is asked."""
        row = super().row
        small = self.ema is None and self.preset != "paper" and row.beta and row.ema == "float32"
        return replace(row, ema="uint8") if small else row

    @property
    def written(self) -> dict[str, float]:
        """The abilities for which the base model writes the rows to keep, each with its share of them."""
        if not self.keep:  # the general behaviour, unless rows to keep are given
            return {} if self.anchors or self.split or self.kept else {GENERAL: 1.0}
        return shares([parse_keep(text) for text in self.keep], anchors=self.anchors is not None)

    @property
    def lost_limit(self) -> float | None:
        """How much past rows may lose before training stops."""
        mark, _, number = self.stop.partition(":")
        return float(number) if mark == "lost" else None

    def settings(self, num_new: int = 0) -> AdaptConfig:
        """With the number of probes: by default as many as new rows, few where the model writes all rows to keep."""
        few = self.written and self.anchors is None
        return self.model_copy(
            update={"num_probes": self.num_probes or (SELF_WRITTEN_PROBES if few else min(512, max(32, num_new)))}
        )

    @property
    def measured(self) -> tuple[str, ...]:
        """The abilities to measure: those named, and what is kept by name; a job runs no code."""
        names = measured_abilities(self.abilities)
        kept = [name for name in self.written if name in MEASURED and names]
        return tuple(name for name in dict.fromkeys((*names, *kept)) if name != CODE)

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """The requirements, parsed."""
        return tuple(parse(text) for text in self.require)


GROUPS: dict[str, tuple[str, ...]] = {
    "What is learned and kept": (
        "new", "anchors", "keep", "past", "validation", "kept", "split", "num_anchors", "num_new", "external",
        "external_limit", "interface", "plain", "chat_template", "turns", "thinking", "columns", "own_answers", "judge",
        "max_new_tokens", "max_length", "too_long", "data_dir",
    ),
    "How it is kept": (
        "preset", "method", "anchor_weight", "beta", "ema", "strength", "bank", "num_probes", "shots", "temperature",
        "topics", "repair",
    ),
    "How it is learned": (
        "epochs", "stop", "batch_size", "order", "optimizer", "lr", "lr_schedule", "warmup_steps",
        "weight_decay", "clip_norm", "load", "lora", "compute_dtype", "gradient_checkpointing", "seed",
    ),
    "What is watched and written": (
        "out", "max_asked", "evaluate_every", "evaluate_rows", "abilities", "require", "keep_best", "save_dtype",
        "compare", "report_to", "checkpoint_minutes", "checkpoint_steps",
    ),
    "Machine": ("device", "sharding", "revision", "trust_remote_code"),
}  # fmt: skip
"""The settings besides the model, in the order they are shown."""


RUN_CODE = ("method", "judge", "trust_remote_code")
"""The settings that can run code: `python:` names and that of a model's repository."""


def paper(model: object) -> dict[str, Any]:
    """The paper's protocol for a model; Phi-3.5 has its own learning rate.

    Paper: Sec. 4.1; App. E. Batch and weight decay: protocol sections 1 and 2.
    """
    phi = str(model) in ("phi-3.5-mini", PRESETS["phi-3.5-mini"])
    return {
        "batch_size": 1,
        "order": "file",
        "lr": 1e-5 if phi else 1e-6,
        "lr_schedule": "constant",
        "warmup_steps": 0,
        "epochs": 25,
        "stop": "never",
        "weight_decay": 0.1,
        "clip_norm": 0.0,
        "num_probes": 512,
        "shots": 2,
        "temperature": 0.8,
        "compute_dtype": "float32",
        "gradient_checkpointing": False,
        "abilities": ("none",),
    }


def settings(values: Mapping[str, Any], *, where: str = "settings") -> AdaptConfig:
    """Check values against the schema; every fault is named."""
    try:
        return AdaptConfig(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def check_repeated(values: Mapping[str, Any], repeated: Mapping[str, Any], where: Path) -> None:
    """Refuse a folder's settings that run code, unless the caller repeats them: the folder may be somebody else's."""
    for name in RUN_CODE:
        value = values.get(name)
        runs = value not in (None, False) if name == "trust_remote_code" else str(value).startswith("python:")
        if (runs or name in repeated) and repeated.get(name) != value:
            raise ValueError(
                f"{where}: expected what can run code to be repeated as it is there, got {name} "
                f"{repeated.get(name, 'not given')}; add "
                f"--set {name}={'true' if value is True else value} if you trust it"
            )


class _Plain(yaml.SafeLoader):
    """YAML in which each name is there once, and no alias, of which a few lines can unfold to gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="write the value itself, not an alias (*)")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a second value of a name."""
        check_once(str(key.value) for key, _ in node.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings of a YAML file, unchecked."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such settings file")
    try:
        values = _Plain(path.read_text(encoding="utf-8")).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected YAML, but it cannot be parsed: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path}: expected names and values, one setting per line, got {type(values).__name__}")
    return values


def schema() -> dict[str, Any]:
    """The JSON Schema of the settings."""
    return AdaptConfig.model_json_schema()


# The settings of `cplus repair`: those of a job that concern rows, probes and evaluation, and its own.


SHARED = (
    "new", "anchors", "keep", "past", "validation", "external", "external_limit", "interface", "plain",
    "chat_template", "turns", "thinking", "columns", "own_answers", "judge", "max_new_tokens", "max_length",
    "too_long", "data_dir", "bank", "num_probes", "shots", "temperature", "topics", "compute_dtype", "seed", "out",
    "max_asked", "abilities", "require", "save_dtype", "checkpoint_minutes", "device", "revision", "trust_remote_code",
)  # fmt: skip
"""The settings of a job that a repair uses too."""
MAX_ROWS = 256
"""Past rows, and new rows, that importance is computed from by default."""
OWN = ("tuned", "by", "tolerance", "max_rows")


class RepairConfig(AdaptConfig):
    """Everything that decides a repair: `model` is the base; settings of the training are refused."""

    tuned: str = Field(
        description="The model fine-tuned from the base: alias, hub id, folder, GGUF file or folder of a LoRA adapter."
    )
    by: Literal["gradients", "merge"] = Field(
        "gradients",
        description="gradients: reset single weights, with both models in memory. merge: base + a (tuned - base) for "
        "each block by forward passes alone, with one model in memory.",
    )
    tolerance: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Share of what was learned that may be given up: of Acquisition (default 0.01: 1 point), or of the "
        "fall of the new loss (default 0.05).",
    )
    max_rows: Positive = Field(
        MAX_ROWS,
        description="Maximum number of past rows, and of new rows, for the importance and the search.",
    )
    validation: str | None = Field("none", description="New rows that were not trained on, to keep as well: a file.")

    @model_validator(mode="after")
    def _no_training(self) -> RepairConfig:
        if self.anchors is None and not self.written:
            raise ValueError("a repair needs rows the base model should keep; provide anchors, or leave out keep none")
        foreign = [name for name in self.model_fields_set if name not in {"model", *SHARED, *OWN}]
        if self.by == "merge" and self.save_dtype != "float32":
            raise ValueError("a merge is written in the precision of the tuned model; leave out save_dtype")
        if changed := [n for n in foreign if getattr(self, n) != type(self).model_fields[n].default]:
            raise ValueError(f"a repair trains nothing, so it has no use for {changed[0]}; leave it out")
        return self

    def shown(self) -> dict[str, Any]:
        """The settings that matter for a repair, as JSON."""
        return {"method": "repair", **self.model_dump(mode="json", include={"model", *OWN, *SHARED})}


def repair_settings(values: dict[str, Any], *, where: str = "settings") -> RepairConfig:
    """Check values against the schema; every fault is named."""
    try:
        return RepairConfig(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


DECIDED = ("out", "split", "num_new", "kept", "compare", "bank", "external_limit", "keep")
"""Settings of `cplus adapt` that `cplus update` sets itself."""
