"""Records: what was asked, what came out, and on what it ran. One JSON file a run; stdlib only."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cplus.files import check_seal, fingerprint, read_json, sealed, write_json

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a run and a sequence of runs both say: the model, the method, its evidence and how it is trained."""

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

    def key(self) -> str:
        """A short name, from what is said beyond the defaults: a later field renames nothing old."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return fingerprint(said)[:16]


@dataclass(frozen=True, kw_only=True)
class RunSpec(Recipe):
    """Everything that decides a run's numbers; two equal specs are the same run.

    `anchor_task` is the task that anchors are drawn from and Retention is measured on, where it is not the new one,
    and `wrong_anchors` of the anchors were answered wrongly; `num_past` bounds the past rows that are asked again.
    `parts` shows the evidence one part of the bank a refresh, every `refresh` steps (None: when the method says);
    `memory` is the weight of the evidence before in the one after a refresh. `warmup` is the share of all updates over
    which the learning rate rises.

    With the interface `freeform` an answer is right when it is the row's response, token for token; past rows are the
    base model's own answers to `anchor_task`, and a multiple-choice `task` is taught as questions with terse answers.
    """

    task: str
    external: tuple[str, ...] = ()
    external_limit: int | None = None
    evaluate_every: int = 0
    num_past: int | None = None
    anchor_task: str = ""
    wrong_anchors: int = 0
    parts: int = 1
    refresh: int | None = None
    memory: float = 0.0
    warmup: float = 0.0
    diagnose: tuple[str, ...] = ()

    @property
    def method_settings(self) -> dict[str, Any]:
        """What is set of the method's evidence and smoothing beyond the row's own values."""
        defaults = {field.name: field.default for field in fields(self)}
        names = ("anchor_weight", "beta", "parts", "refresh", "memory")
        return {name: value for name in names if (value := getattr(self, name)) != defaults[name]}

    def __post_init__(self) -> None:
        if self.interface != "freeform":
            return
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
class RunResult:
    """A run's figures, with the spec and the environment that made them; percentages are 0-100.

    `external` holds for each outside task the accuracy before and after and the share of right answers kept.
    `cost` holds FLOPs of training and of recurring preservation passes, rows and tokens; `overlap` counts the past
    questions that also stand in the bank, and `retention_uncovered` leaves them out. `correction` is the share of
    wrong past-task rows, never trained on, that came right: only where anchors are of another task. `past_nll` and
    `new_nll` are the mean token losses of past and new answers in nats, of free text only; its `curve` begins with the
    base model, at epoch 0.
    """

    spec: RunSpec
    retention: float
    retention_uncovered: float
    acquisition: float
    external: dict[str, dict[str, float]]
    counts: dict[str, int]
    cost: dict[str, int]
    seconds: float
    extra_bytes: int
    curve: list[dict[str, float]] = field(default_factory=list)
    correction: float | None = None
    past_nll: float | None = None
    new_nll: float | None = None
    diagnostics: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def external_kept(self) -> float | None:
        """The mean over outside tasks of the share of right answers kept; None where there is no such task."""
        kept = [task["kept"] for task in self.external.values()]
        return sum(kept) / len(kept) if kept else None


def result_name(spec: RunSpec) -> str:
    """The name of a run's file."""
    return f"{spec.method.replace(':', '.')}-{spec.seed}-{spec.key()}.json"


def save_result(result: RunResult, folder: Path) -> Path:
    """Write the result under its spec's name."""
    path = folder / result_name(result.spec)
    write_json(path, sealed({"schema": SCHEMA, **asdict(result)}))
    return path


def load_result(path: Path) -> RunResult:
    """Read a result; one of another schema, with other fields or altered since it was written is refused."""
    raw = read_json(path)
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ValueError(f"{path}: expected a run record of schema {SCHEMA}; it was written by another version")
    check_seal(path, raw)
    del raw["schema"], raw["sha256"]
    try:
        spec = raw.pop("spec")
        for name in ("external", "diagnose"):
            spec[name] = tuple(spec.get(name, ()))
        return RunResult(spec=RunSpec(**spec), **raw)
    except (KeyError, TypeError, ValueError) as error:
        names = ", ".join(f.name for f in fields(RunResult))
        raise ValueError(f"{path}: expected the fields {names}; {error}") from error


@dataclass(frozen=True, kw_only=True)
class SequenceSpec(Recipe):
    """Everything that decides the numbers of tasks learned one after another; equal specs are the same sequence.

    `method` adapts from the second task on; the first task, before which there is no past, is learned by
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
        """The run that one stage is, counted from 1; what is set of the evidence is the later stages'."""
        first = {"anchor_weight", "beta"} if number == 1 else set()
        shared = {f.name for f in fields(Recipe)} - {"method"} - first
        return RunSpec(
            task=self.tasks[number - 1],
            method=self.first_method if number == 1 else self.method,
            **{name: getattr(self, name) for name in shared},
        )


@dataclass(frozen=True, kw_only=True)
class SequenceResult:
    """A sequence's figures, with the spec and the environment that made them; percentages are 0-100.

    `accuracy` has one line a stage, the base model's first, with every task's accuracy in the spec's order; `sizes`
    counts each task's rows. `stages` has for each stage its task, its new rows, Acquisition, Retention of the rows of
    earlier tasks that were right before it (None at the first) and of its own task's. `survival` is the share of
    learned rows still right after 0, 1, ... further stages.
    """

    spec: SequenceSpec
    accuracy: list[list[float]]
    sizes: dict[str, int]
    stages: list[dict[str, Any]]
    survival: list[float]
    counts: dict[str, int]
    cost: dict[str, int]
    seconds: float
    environment: dict[str, Any] = field(default_factory=dict)


def sequence_name(spec: SequenceSpec) -> str:
    """The name of a sequence's file."""
    return f"sequence-{spec.method.replace(':', '.')}-{spec.seed}-{spec.key()}.json"


def save_sequence(result: SequenceResult, folder: Path) -> Path:
    """Write the result under its spec's name."""
    path = folder / sequence_name(result.spec)
    write_json(path, sealed({"schema": SCHEMA, "kind": "sequence", **asdict(result)}))
    return path


def load_sequence(path: Path) -> SequenceResult:
    """Read a sequence's result; one of another schema or kind, with other fields or altered since is refused."""
    raw = read_json(path)
    if not isinstance(raw, dict) or (raw.get("schema"), raw.get("kind")) != (SCHEMA, "sequence"):
        raise ValueError(f"{path}: expected a sequence's record of schema {SCHEMA}; it was written by another version")
    check_seal(path, raw)
    del raw["schema"], raw["kind"], raw["sha256"]
    try:
        spec = raw.pop("spec")
        spec["tasks"] = tuple(spec["tasks"])
        return SequenceResult(spec=SequenceSpec(**spec), **raw)
    except (KeyError, TypeError, ValueError) as error:
        names = ", ".join(f.name for f in fields(SequenceResult))
        raise ValueError(f"{path}: expected the fields {names}; {error}") from error


def environment(*, threads: int, device: str) -> dict[str, Any]:
    """What could change a number besides the spec: versions, machine, threads, commit."""
    packages = ("cplus", "torch", "transformers", "tokenizers", "numpy")
    return {
        "versions": {name: _version(name) for name in packages},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": threads,
        "device": device,
        "commit": _commit(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of a source checkout, None for an installed package."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
