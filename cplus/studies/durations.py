"""How long runs will take: from finished ones like them, else from their arithmetic at a stated speed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from cplus.experiment.record import RunSpec
from cplus.studies.study import Result, Spec

PARAMETERS = {
    "toy-s": 183e3,
    "toy": 602e3,
    "toy-l": 2.64e6,
    "smollm2-135m": 134.5e6,
    "qwen3-0.6b": 596e6,
    "qwen3-1.7b": 1.72e9,
    "qwen3-4b": 4.02e9,
    "gemma-2-2b-it": 2.61e9,
    "phi-3.5-mini": 3.82e9,
}
TOKENS = {"cloze": 14, "letter": 110, "freeform": 60}
NEW_ROWS = 680  # where a spec takes every wrong row
PAST_ROWS = 2000  # where a spec asks every past row
SPEED = {True: 50e9, False: 60e12}
"""FLOPs a second on one core for small models (about what the toy models reach), on a GPU for large: stated."""
OVERHEAD = 1.5


def flops(spec: Spec) -> float:
    """Forward and backward passes of training and evidence, and the forward passes of evaluation."""
    new = spec.num_new or NEW_ROWS
    trained = new * (2 if "replay" in spec.method else 1) * spec.epochs
    evidence = (spec.num_anchors + spec.num_probes) * spec.epochs
    asked = 4 * PAST_ROWS
    if isinstance(spec, RunSpec):
        asked = (spec.num_past or PAST_ROWS) + new + len(spec.external) * (spec.external_limit or PAST_ROWS)
        asked *= 1 + (spec.epochs // spec.evaluate_every if spec.evaluate_every else 0)
        evidence //= spec.parts
        if {"reference", "audit"} & set(spec.diagnose):
            evidence += 2 * PAST_ROWS * (spec.epochs if "reference" in spec.diagnose else 4)
    stages = 1 if isinstance(spec, RunSpec) else len(spec.tasks)
    choices = 4 if spec.interface == "cloze" else 1
    size = PARAMETERS.get(spec.model, 1e9) * TOKENS[spec.interface]
    return stages * size * (6 * (trained + evidence) + 2 * asked * choices / 2)


def seconds(spec: Spec, known: Sequence[Result]) -> float:
    """The median time of finished runs of the same model and kind, scaled by arithmetic; else arithmetic alone."""
    own = flops(spec)
    like = [r for r in known if r.spec.model == spec.model and type(r.spec) is type(spec)]
    same = [r for r in like if r.spec.method == spec.method] or like
    rates: list[float] = [
        r.environment["wall_seconds"] / flops(r.spec) for r in same if "wall_seconds" in r.environment
    ]
    if rates:
        return own * statistics.median(rates)
    return OVERHEAD + own / SPEED[PARAMETERS.get(spec.model, 1e9) < 200e6]


def memory(spec: Spec) -> float:
    """Bytes a worker needs: interpreter and libraries, and weights, gradients, moments, copy, evidence and average."""
    return 0.7e9 + 32 * PARAMETERS.get(spec.model, 1e9)


def fitting(workers: int, specs: Sequence[Spec], available: float) -> int:
    """How many of the workers fit into so many bytes, at least one.

    >>> spec = RunSpec(model="toy", task="", interface="cloze", method="sft", seed=0, num_anchors=0, num_probes=0)
    >>> fitting(8, [], 1e9), fitting(8, [spec], 3e9)
    (8, 4)
    """
    need = max((memory(spec) for spec in specs), default=0.0)
    return workers if not need else max(1, min(workers, int(available // need)))
