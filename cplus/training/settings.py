"""The settings of the engine: one value decides a training, for studies, sequences and jobs alike; no torch.

A study's run (`RunSpec`), a stage of a sequence (`SequenceSpec`) and a job (`cplus.jobs.settings.AdaptConfig`) each
give a `Settings`; the driver knows nothing else. Equal settings on equal rows give equal weights, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, cast

from cplus.base.files import fingerprint
from cplus.methods import table
from cplus.methods.adapters import Lora
from cplus.methods.table import Method
from cplus.probes.settings import TOPICS, ProbeSettings

OptimizerName: TypeAlias = Literal["adamw", "adamw8bit", "sgd"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a training besides the base model and its rows; None is the method's own value.

    The learning rate rises over `warmup_steps` updates, or over `warmup_share` of all updates. `micro_batches` is the
    number of parts in which a batch is computed by any number of processes, with the same bits (`cplus.core.passes`).
    """

    method: str
    seed: int
    epochs: int
    lr: float
    batch_size: int = 1
    order: Literal["file", "shuffled"] = "file"
    optimizer: OptimizerName = "adamw"
    weight_decay: float = 0.0
    clip_norm: float | None = None
    warmup_steps: int = 0
    warmup_share: float = 0.0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    anchor_weight: float | None = None
    beta: float | None = None
    ema: Literal["float32", "bfloat16", "uint8"] | None = None
    parts: int | None = None
    refresh: int | None = None
    memory: float | None = None
    strength: float | None = None
    num_probes: int = 0
    shots: int = 2
    temperature: float = 0.8
    topics: bool = False
    lora: Lora | None = None
    compute_dtype: str = "float32"
    gradient_checkpointing: bool = False
    micro_batches: int | None = None

    @property
    def row(self) -> Method:
        """The method's row with these settings; a setting it has no use for is refused."""
        return table.configured(
            table.method(self.method),
            anchor_weight=self.anchor_weight,
            beta=self.beta,
            ema=self.ema,
            parts=self.parts,
            refresh=self.refresh,
            memory=self.memory,
            strength=self.strength,
        )

    @property
    def probes(self) -> ProbeSettings:
        """How the frozen model writes the bank."""
        return ProbeSettings(
            num_probes=self.num_probes,
            shots=self.shots,
            temperature=self.temperature,
            topics=TOPICS if self.topics else (),
            seed=self.seed,
        )


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
    evaluation in which the loss of the new rows is at most this.

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
    def settings(self) -> Settings:
        """The engine's settings."""
        return Settings(
            method=self.method,
            seed=self.seed,
            epochs=self.epochs,
            lr=self.lr,
            batch_size=self.batch_size,
            order=cast(Literal["file", "shuffled"], self.order),
            optimizer=cast(OptimizerName, self.optimizer),
            weight_decay=self.weight_decay,
            warmup_share=self.warmup,
            num_probes=self.num_probes,
            shots=self.shots,
            temperature=self.temperature,
            topics=self.topics,
            lora=Lora(r=self.lora, alpha=2.0 * self.lora) if self.lora else None,
            compute_dtype=self.compute_dtype,
            **self.method_settings,
        )

    @property
    def method_settings(self) -> dict[str, Any]:
        """The settings of evidence and smoothing that differ from the defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        names = ("anchor_weight", "beta", "parts", "refresh", "memory", "strength")
        return {name: value for name in names if (value := getattr(self, name)) != defaults[name]}

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
        if senseless := [name for name in self.diagnose if name in ("prior", "permuted")]:
            raise ValueError(f"free text has no options, so there is no {senseless[0]!r} to diagnose; leave it out")


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
