"""One settings value decides a training, for studies, sequences and jobs alike; no torch.

A job's schema (`cplus.jobs.settings.AdaptConfig`) is a `TrainSettings` with more fields; a study's run (`RunSpec`) and
a stage of a sequence give one. The driver knows nothing else. Equal settings on equal rows give equal weights, bit for
bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cplus.base.files import fingerprint
from cplus.methods import table
from cplus.methods.table import Method
from cplus.probes.settings import TOPICS, ProbeSettings

OptimizerName: TypeAlias = Literal["adamw", "adamw8bit", "sgd"]
WARMUP_SHARE = 0.1
"""A job's learning rate rises over this share of its updates unless it says otherwise (docs/results.md, frontier)."""
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


def _rate(value: object) -> object:
    """A number above 0."""
    if value is None:
        return value
    try:
        rate = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except ValueError:
        rate = math.nan
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"expected a learning rate above 0, got {value!r:.60}")
    return rate


def _lora(value: object) -> object:
    """`r=16,merge=false` as a mapping; other values are left to the schema."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",")]
    if not all(mark for _, mark, _ in pairs):
        raise ValueError(f"expected r=16 or r=16,alpha=32,dropout=0.05,merge=false, got {value!r}")
    return {key.strip(): text.strip() for key, _, text in pairs}


class Lora(BaseModel):
    """The settings of low-rank adapters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    r: Annotated[int, Field(ge=1, description="Rank.")] = 16
    alpha: Annotated[float, Field(gt=0, description="Scale: the product is multiplied by alpha / r.")] = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1, description="Dropout on the adapters' input.")] = 0.0
    merge: Annotated[bool, Field(description="Write one plain model; false writes the adapters alone.")] = True


class TrainSettings(BaseModel):
    """Everything that decides a training besides the base model and its rows; None is the method's own value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    method: str = Field(
        "cplus",
        description="Name from 'cplus methods', or python:module:ROW for your own; not given, free text with no rows "
        "to keep has divergence.",
    )
    anchor_weight: Share | None = Field(
        None, description="Weight of the anchors against the probes in the evidence; default: the method's own, 0.5."
    )
    beta: float | None = Field(
        None, ge=0, lt=1, description="Smoothing of the mask over steps; default: the method's own, 0.9."
    )
    ema: Literal["float32", "bfloat16", "uint8"] | None = Field(
        None,
        description="Type of the gate's average: 4, 2 or 1 bytes per parameter; default: uint8 in a job, "
        "float32, the paper's, in a study and with preset=paper.",
    )
    strength: float | None = Field(
        None, description="Weight, threshold or share of a method that has one; default: the method's own."
    )
    num_probes: Positive | None = Field(
        None,
        description="Number of probes in the bank (N); default: 16 where the model writes all rows to keep itself, "
        "else the number of new rows, at least 32, at most 512.",
    )
    shots: Positive = Field(2, description="Anchors shown in each request for a probe (K).")
    temperature: float = Field(0.8, gt=0, description="Sampling temperature of the probes (T).")
    topics: bool = Field(False, description="Name one of 24 topics in each request for a probe.")
    epochs: Positive = Field(
        25,
        description="Maximum number of epochs; default: 25, for free text those of 60 updates, at least 3.",
    )
    batch_size: Positive = Field(
        8, description="New rows per update, split into smaller passes where memory requires it."
    )
    order: Literal["shuffled", "file"] = Field("shuffled", description="Order of the new rows within an epoch.")
    optimizer: OptimizerName = Field(
        "adamw", description="Optimizer that proposes the update; adamw8bit keeps its moments in 8 bits (bitsandbytes)."
    )
    lr: Annotated[float | None, BeforeValidator(_rate)] = Field(
        None, description="Learning rate; default: by the size of the model."
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate schedule; linear and cosine decay to 0."
    )
    warmup_steps: int | None = Field(
        None,
        ge=0,
        description="Number of updates over which the learning rate rises from 0; default: a tenth of all updates.",
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay; part of the proposed update, so it is gated too.")
    clip_norm: float = Field(1.0, ge=0, description="Maximum norm of the gradient; 0 disables clipping.")
    lora: Annotated[Lora | None, BeforeValidator(_lora)] = Field(
        None, description="Train LoRA adapters: r=16, or r=16,alpha=32,dropout=0.05,merge=false."
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Precision of forward and backward passes; weights and optimizer state stay float32. Default: "
        "bfloat16 on GPUs that have it.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Recompute activations in the backward pass: less memory, about a third more time; default: where "
        "memory requires it.",
    )
    seed: int = Field(0, ge=0, description="Random seed for drawing anchors, sampling probes and ordering rows.")

    @property
    def row(self) -> Method:
        """The method's row with these settings; a setting it has no use for is refused."""
        own: dict[str, Any] = {name: getattr(self, name, None) for name in ("ema", *_OF_METHODS)}
        return table.configured(table.method(self.method), **own)

    @property
    def probes(self) -> ProbeSettings:
        """How the frozen model writes the bank."""
        return ProbeSettings(
            num_probes=self.num_probes or 0,
            shots=self.shots,
            temperature=self.temperature,
            topics=TOPICS if self.topics else (),
            seed=self.seed,
        )


class StudySettings(TrainSettings):
    """The settings of a study's run, with those that a job has no names for; its rate may be 0."""

    lr: float = Field(ge=0)
    parts: int | None = None
    refresh: int | None = None
    memory: float | None = None
    warmup: float = 0.0


_OF_METHODS = ("anchor_weight", "beta", "parts", "refresh", "memory", "strength")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The fields that a run and a sequence share: the model, the method, its evidence and how it is trained.

    With `topics` each request for a probe names one of 24 broad areas. `compute_dtype` is the precision of all passes,
    of training, evidence and evaluation; weights, optimizer and gate stay float32.
    """

    model: str
    interface: str
    method: str
    seed: int
    num_anchors: int
    num_probes: int
    num_new: int | None = None
    shots: int = 2
    temperature: float = 0.8
    anchor_weight: float = 0.5
    beta: float = 0.9
    optimizer: str = "adamw"
    lr: float = 1e-6
    weight_decay: float = 0.1
    epochs: int = 25
    batch_size: int = 1
    order: str = "file"
    topics: bool = False
    compute_dtype: str = "float32"

    def key(self) -> str:
        """A hash of the non-default fields, so new fields keep old names."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return fingerprint(changed)[:16]


@dataclass(frozen=True, kw_only=True)
class RunSpec(Recipe):
    """Everything that decides a run's numbers; two equal specs are the same run.

    `anchor_task` is the task that anchors are drawn from and Retention is measured on, where it is not the new one,
    and `wrong_anchors` of the anchors were answered incorrectly. With `all_anchors` every past row is an anchor and
    `num_anchors` is 0. `num_rows` bounds the task's rows, the first ones in file order, and `num_past` the past rows
    that are evaluated. With `lora` only adapters of this rank on all linear layers are trained, and merged at the end.
    `parts` splits the bank: each refresh uses one part. `refresh` is the number of steps between refreshes (None: the
    method's own); `memory` is the weight of the earlier evidence after a refresh. `warmup` is the share of all updates
    over which the learning rate rises. `strength` is the weight, threshold or share of a method that has one (None: the
    method's own). With `stop_at` training ends `beyond` epochs after the first in which this percentage of the new rows
    is right, or after `epochs`.

    `keep` says what the rows to keep are: `anchors` and probes written from them, rows that the base model writes from
    nothing (`general`), or `both`, half of the probes from each. With `stop_loss` training ends after the first
    evaluation in which the loss of new rows that are not trained on is at most this.

    With the interface `freeform` an answer is right when it is the row's response, token for token; past rows are the
    base model's own answers to `anchor_task`, and a multiple-choice `task` is taught as questions with terse answers.
    """

    task: str
    external: tuple[str, ...] = ()
    external_limit: int | None = None
    evaluate_every: int = 0
    num_rows: int | None = None
    num_past: int | None = None
    lora: int = 0
    anchor_task: str = ""
    all_anchors: bool = False
    wrong_anchors: int = 0
    parts: int = 1
    refresh: int | None = None
    memory: float = 0.0
    warmup: float = 0.0
    stop_at: float | None = None
    beyond: int = 0
    strength: float | None = None
    keep: Literal["anchors", "general", "both"] = "anchors"
    stop_loss: float | None = None
    diagnose: tuple[str, ...] = ()

    @property
    def settings(self) -> StudySettings:
        """The engine's settings, by name; those of the method only where they differ from the defaults."""
        shared = {f.name for f in fields(self)} & StudySettings.model_fields.keys() - {*_OF_METHODS, "lora"}
        own = {name: getattr(self, name) for name in shared} | {"num_probes": self.num_probes or None}
        lora = Lora(r=self.lora, alpha=2.0 * self.lora) if self.lora else None
        return StudySettings(**own, **self.method_settings, lora=lora, clip_norm=0.0)

    @property
    def method_settings(self) -> dict[str, Any]:
        """The settings of evidence and smoothing that differ from the defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name in _OF_METHODS if (value := getattr(self, name)) != defaults[name]}

    def __post_init__(self) -> None:
        if self.all_anchors and (self.num_anchors or self.wrong_anchors or self.keep != "anchors"):
            raise ValueError(
                f"with all_anchors every past row is an anchor, so num_anchors and wrong_anchors must be 0 and keep "
                f"must be anchors, got {self.num_anchors}, {self.wrong_anchors} and {self.keep}"
            )
        if self.interface != "freeform":
            if self.keep != "anchors" or self.stop_loss is not None:
                raise ValueError("rows written from nothing and a loss to stop at need the interface freeform")
            return
        if self.stop_loss is not None and self.evaluate_every != 1:
            raise ValueError(f"stop_loss needs an evaluation every epoch, got evaluate_every={self.evaluate_every}")
        if self.anchor_task in ("", self.task):
            raise ValueError(
                f"free text is kept as the base model's own answers to another task's requests; expected an "
                f"anchor_task besides {self.task}, like instruct_short, got {self.anchor_task or 'none'}"
            )
        if self.wrong_anchors:
            raise ValueError(
                f"the base model's own answers are all right, so wrong_anchors must be 0, got {self.wrong_anchors}"
            )


@dataclass(frozen=True, kw_only=True)
class SequenceSpec(Recipe):
    """Everything that decides the numbers of tasks learned one after another; equal specs are the same sequence.

    `method` adapts from the second task on; the first task, which has no past tasks, is learned by
    `first_method`, so that all methods share its checkpoint. `num_anchors` and `num_probes` are for each past task,
    `num_new` for each stage; `num_rows` bounds the rows of every task, drawn by the seed.
    """

    tasks: tuple[str, ...]
    num_rows: int | None = None
    first_method: str = "sft"

    def __post_init__(self) -> None:
        if len(set(self.tasks)) != len(self.tasks) or not self.tasks:
            raise ValueError(f"expected different tasks, at least one, got {', '.join(self.tasks) or 'none'}")
        if self.interface == "freeform":
            raise ValueError("the tasks of a sequence are multiple choice; expected the interface letter or cloze")

    def stage(self, number: int) -> RunSpec:
        """The run of one stage, counted from 1; settings of the evidence apply to the later stages only."""
        first = {"anchor_weight", "beta"} if number == 1 else set()
        shared = {f.name for f in fields(Recipe)} - {"method"} - first
        return RunSpec(
            task=self.tasks[number - 1],
            method=self.first_method if number == 1 else self.method,
            **{name: getattr(self, name) for name in shared},
        )
