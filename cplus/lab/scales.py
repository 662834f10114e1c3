"""The scales: each has one base setting from which all studies derive their runs, so that studies share runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cplus.lab.records import RunResult
from cplus.methods.table import method
from cplus.training.settings import RunSpec, SequenceSpec

BUDGETS = (4, 8, 16, 32, 64, 128)
SCARCE = (4, 8)
BASELINES = ("sft", "replay", "probe-replay", "cpl")
MAIN = (*BASELINES, "cplus")
METHODS = ("sft", "replay", "cpl", "cplus")
"""The methods of comparisons that have no room for all."""


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """A cell of E1's grid: a model with its learning rate, a task, and its anchor budgets."""

    model: str
    task: str
    lr: float
    budgets: tuple[int, ...]

    @property
    def place(self) -> dict[str, Any]:
        """The settings of a run in this cell."""
        return {"model": self.model, "task": self.task, "lr": self.lr}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of the studies: the base setting, the grid, and the seeds where the paper has five, three or one.

    The defaults are the paper's.

    `small_bank` is the number of probes in the compute comparison, `large_bank` in the rotating bank;
    `aggressive_schedule` is E8's learning rate and epochs; `new_and_anchor_task` is E7's new task and the task of its
    anchors; `sequence_rows` limits the rows of each of E5's tasks; `curve_dtype` is the precision of E6's curves;
    `studies` are the studies run at this scale.
    """

    name: str
    summary: str
    base: RunSpec
    grid: tuple[GridCell, ...]
    tasks: tuple[str, ...]
    aggressive_schedule: tuple[float, int]
    new_and_anchor_task: tuple[str, str]
    seeds_where_five: int = 5
    seeds_where_three: int = 3
    seeds_where_one: int = 1
    budgets: tuple[int, ...] = BUDGETS
    small_bank: int = 32
    large_bank: int = 2048
    sequence_rows: int | None = None
    curve_dtype: str = "float32"
    shots: tuple[int, ...] = (2, 4)
    temperatures: tuple[float, ...] = (0.5, 0.8, 1.1)
    studies: tuple[str, ...] = tuple(f"e{n:02d}" for n in range(1, 15))

    @property
    def anchors(self) -> int:
        """The anchor budget of comparisons at one budget."""
        return self.base.num_anchors

    def at(self, **changes: Any) -> RunSpec:
        """The base setting with these changes in canonical form; outside tasks exclude the new and the anchor task."""
        spec = replace(self.base, **changes)
        return canonical(
            replace(spec, external=tuple(t for t in spec.external if t not in (spec.task, spec.anchor_task)))
        )

    def each(self, axes: Mapping[str, Iterable[Any]], **fixed: Any) -> list[RunSpec]:
        """`at` for every combination of the values of some settings, the last of them varying fastest."""
        return [self.at(**fixed, **dict(zip(axes, values, strict=True))) for values in product(*axes.values())]


def canonical(spec: RunSpec) -> RunSpec:
    """The spec without settings that its method ignores, the seed included, so that equal runs have equal names."""
    row = method(spec.method)
    if not row.needs_bank:
        spec = replace(spec, num_probes=0, shots=2, temperature=0.8, topics=False)
    if not row.needs_anchors and not spec.anchor_task:
        spec = replace(spec, num_anchors=0, all_anchors=False)
    return replace(spec, seed=0) if seedless(spec) else spec


def family(results: Sequence[RunResult]) -> list[RunResult]:
    """The results of models that share the first one's family name: `qwen3`, `toy`.

    Paper: Sec. 4.2 and App. E.1 compare gain and scale within the Qwen3 family.
    """
    return [result for result in results if same_family(result.spec.model, results[0].spec.model)]


def same_family(model: str, other: str) -> bool:
    """Whether two models' names begin with the same family.

    >>> same_family("qwen3-4b", "qwen3-0.6b"), same_family("gemma-2-2b-it", "qwen3-0.6b")
    (True, False)
    """
    return model.split("-")[0] == other.split("-")[0]


def seedless(spec: RunSpec | SequenceSpec) -> bool:
    """Whether the seed has no effect: a deterministic method on all new rows in file order, evaluated on all rows."""
    if spec.order != "file" or spec.num_new is not None or spec.method.startswith("python:"):
        return False  # a user's own method may not be importable where results are only read
    if method(spec.method).draws:
        return False
    if isinstance(spec, SequenceSpec):
        return not method(spec.first_method).draws and spec.num_rows is None
    whole = spec.num_past is None and (not spec.external or spec.external_limit is None)
    return whole and not spec.anchor_task


DOMAINS = ("harbours", "craftsmen", "plants", "machines")
# The learning rate falls with the width (48, 96, 192): one rate for all would move the wide model further.
TOYS = {"toy-s": 3e-3, "toy": 1.5e-3, "toy-l": 7.5e-4}
_TOY = RunSpec(
    model="toy",
    task="harbours",
    interface="cloze",
    method="cplus",
    seed=0,
    num_anchors=8,
    num_probes=128,
    num_new=96,
    lr=TOYS["toy"],
    weight_decay=0.0,
    epochs=12,
    batch_size=32,
    order="shuffled",
    external=DOMAINS,
    external_limit=400,
)
# The frontier's rates were chosen on the toy world.
TOY_STUDIES = (*(f"e{n:02d}" for n in range(1, 15)), "frontier")
SMOKE = Scale(
    name="smoke",
    summary="the smallest toy model, one seed, a few steps: does every study run?",
    base=replace(
        _TOY,
        model="toy-s",
        num_anchors=4,
        num_probes=8,
        num_new=8,
        lr=TOYS["toy-s"],
        epochs=2,
        batch_size=8,
        external=("machines",),
        external_limit=32,
        num_past=64,
    ),
    grid=(GridCell(model="toy-s", task="harbours", lr=TOYS["toy-s"], budgets=(4, 8)),),
    tasks=("harbours", "craftsmen"),
    seeds_where_five=1,
    seeds_where_three=1,
    budgets=(4, 8),
    small_bank=4,
    large_bank=16,
    aggressive_schedule=(1e-2, 1),
    new_and_anchor_task=("plants", "harbours"),
    sequence_rows=128,
    temperatures=(0.8,),
    studies=TOY_STUDIES,
)
DESK = Scale(
    name="desk",
    summary="the toy world at full statistics: two cores, about an hour",
    base=_TOY,
    grid=(
        GridCell(model="toy", task="harbours", lr=TOYS["toy"], budgets=BUDGETS),
        *(GridCell(model="toy", task=task, lr=TOYS["toy"], budgets=SCARCE) for task in DOMAINS[1:]),
        *(GridCell(model=model, task="harbours", lr=TOYS[model], budgets=SCARCE) for model in ("toy-s", "toy-l")),
    ),
    tasks=DOMAINS,
    seeds_where_three=5,
    seeds_where_one=3,
    large_bank=512,
    aggressive_schedule=(5e-3, 10),
    new_and_anchor_task=("machines", "harbours"),
    sequence_rows=1024,
    studies=TOY_STUDIES,
)
# Free text, where SFT forgets much: terse answers are taught to a chat model (docs/studies.md).
_SMOLLM = RunSpec(
    model="smollm2-135m",
    task="arc_easy",
    anchor_task="instruct_short",
    interface="freeform",
    method="cplus",
    seed=0,
    num_anchors=8,
    num_probes=16,
    num_new=64,
    lr=3e-5,
    weight_decay=0.0,
    epochs=4,
    batch_size=8,
    order="shuffled",
    warmup=0.1,
    evaluate_every=1,
    num_rows=200,
    num_past=24,
)
DESK_REAL = Scale(
    name="desk-real",
    summary="small real models, in free text at equal learning and on facts: one core, hours",
    base=_SMOLLM,
    grid=(GridCell(model="smollm2-135m", task="arc_easy", lr=_SMOLLM.lr, budgets=(8,)),),
    tasks=("arc_easy",),
    seeds_where_five=3,
    seeds_where_one=0,
    budgets=(8,),
    small_bank=16,
    large_bank=32,
    aggressive_schedule=(1e-4, 4),
    new_and_anchor_task=("csqa", "instruct_short"),
    studies=("chat", "facts"),
)
QWEN = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")
OTHERS = {"gemma-2-2b-it": 1e-6, "phi-3.5-mini": 1e-5}
BENCHMARKS = ("csqa", "arc_c", "mmlu", "medqa")
PAPER = Scale(
    name="paper",
    summary="the published grid: five models, GPUs, weeks",
    base=RunSpec(
        model="qwen3-0.6b",
        task="csqa",
        interface="letter",
        method="cplus",
        seed=0,
        num_anchors=8,
        num_probes=512,
        external=("arc_c", "hellaswag", "piqa", "winogrande", "openbookqa"),
        topics=True,
        compute_dtype="bfloat16",
    ),
    grid=tuple(
        GridCell(model=model, task=task, lr=lr, budgets=BUDGETS)
        for model, lr in {**dict.fromkeys(QWEN, 1e-6), **OTHERS}.items()
        for task in BENCHMARKS
    ),
    tasks=BENCHMARKS,
    aggressive_schedule=(1e-5, 10),
    new_and_anchor_task=("medqa", "csqa"),
    temperatures=(0.6, 0.8, 1.0),
)
SCALES = {scale.name: scale for scale in (SMOKE, DESK, DESK_REAL, PAPER)}


def scale_named(name: str) -> Scale:
    """The scale of that name; an unknown name is an error that suggests the nearest ones."""
    if name not in SCALES:
        near = difflib.get_close_matches(name, SCALES, n=2) or list(SCALES)
        raise ValueError(f"unknown scale {name!r}; did you mean {' or '.join(near)}? There are {', '.join(SCALES)}")
    return SCALES[name]
