"""Records of studies: a run's or a sequence's figures beside its settings, one sealed JSON object each; no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

from cplus.base.files import check_seal, read_json, sealed, write_json
from cplus.training.settings import RunSpec, SequenceSpec

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run's figures, with the spec and the environment that produced them; percentages are 0-100.

    `external` holds for each external task the accuracy before and after and the share of right answers kept.
    `cost` holds FLOPs of training and of recurring preservation passes, rows and tokens; `overlap` counts the past
    questions that are also in the bank, and `retention_uncovered` leaves them out. Only where anchors are of another
    task: `correction`, the share of wrong past-task rows, never trained on, that came right, and `anchors_right`, the
    share of the anchors themselves that are right. `past_nll` and `new_nll` are the mean token losses of past and new
    answers in nats, of free text only; its `curve` begins with the base model, at epoch 0, and has what methods are
    compared by. `repair` is what a method's
    repair after training undid, or why it was `refused`; records written before it was kept have None. Of free text
    also: `held_nll`, the loss of new rows that were not trained on, `divergence`, KL(base, tuned) in nats per token at
    past rows that are no anchors and in no bank, and `once`, the FLOPs and seconds of what does not recur: what is read
    before the first update, what is done after the last, and by estimate the writing of the banks.
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
    anchors_right: float | None = None
    past_nll: float | None = None
    new_nll: float | None = None
    held_nll: float | None = None
    divergence: float | None = None
    once: dict[str, float] = field(default_factory=dict)
    repair: dict[str, Any] | None = None
    diagnostics: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def external_kept(self) -> float | None:
        """The mean over external tasks of the share of right answers kept; None where there is no such task."""
        kept = [task["kept"] for task in self.external.values()]
        return sum(kept) / len(kept) if kept else None


@dataclass(frozen=True, kw_only=True)
class SequenceResult:
    """A sequence's figures, with the spec and the environment that produced them; percentages are 0-100.

    `accuracy` has one line per stage, the base model's first, with every task's accuracy in the spec's order; `sizes`
    counts each task's rows. `stages` has for each stage its task, its new rows, Acquisition, Retention of the rows of
    earlier tasks that were right before it (None at the first) and of its own task's, and its repair. `survival` is the
    share of learned rows still right after 0, 1, ... further stages.
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


Spec: TypeAlias = RunSpec | SequenceSpec
Result: TypeAlias = RunResult | SequenceResult


def record_name(spec: Spec) -> str:
    """The name of a run's or a sequence's record."""
    kind = "sequence-" if isinstance(spec, SequenceSpec) else ""
    return f"{kind}{spec.method.replace(':', '.')}-{spec.seed}-{spec.key()}.json"


def record_of(result: Result) -> dict[str, Any]:
    """The JSON object of a result, with its seal."""
    kind = {"kind": "sequence"} if isinstance(result, SequenceResult) else {}
    return sealed({"schema": SCHEMA, **kind, **asdict(result)})


def save_result(result: Result, folder: Path) -> Path:
    """Write the result as a file of its own, under its record's name."""
    path = folder / record_name(result.spec)
    write_json(path, record_of(result))
    return path


def load_result(path: Path) -> Result:
    """Read a result's own file; one of another schema, with other fields or altered since it was written is refused."""
    return parse_result(read_json(path), str(path))


def parse_result(raw: Any, where: str) -> Result:
    """The result that a JSON object holds; `where` names its place in errors."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA or raw.get("kind", "sequence") != "sequence":
        raise ValueError(f"{where}: expected a run record of schema {SCHEMA}; it was written by another version")
    check_seal(where, raw)
    result: Any = SequenceResult if "kind" in raw else RunResult
    make: Any = SequenceSpec if "kind" in raw else RunSpec
    given = {name: value for name, value in raw.items() if name not in ("schema", "kind", "sha256", "spec")}
    try:
        # JSON has no tuples, and settings of a run are hashable.
        spec = {name: tuple(value) if isinstance(value, list) else value for name, value in raw["spec"].items()}
        found: Result = result(spec=make(**spec), **given)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        names = ", ".join(f.name for f in fields(result))
        raise ValueError(f"{where}: expected the fields {names}; {error}") from error
    return found
