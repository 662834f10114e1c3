"""Estimated time and memory of runs: from similar finished runs, else from their FLOPs at an assumed speed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from cplus.experiment.settings import RunSpec
from cplus.models.packages import PACKAGED
from cplus.selection import method
from cplus.studies.study import Result, Spec

PARAMETERS = {
    "toy-s": 183e3,
    "toy": 602e3,
    "toy-l": 2.64e6,
    **{alias: float(model.parameters) for alias, model in PACKAGED.items()},
    "qwen3-0.6b": 596e6,
    "qwen3-1.7b": 1.72e9,
    "qwen3-4b": 4.02e9,
    "gemma-2-2b-it": 2.61e9,
    "phi-3.5-mini": 3.82e9,
}
TOKENS = {"cloze": 14, "letter": 110, "freeform": 60}
NEW_ROWS = 680  # assumed if a spec trains on all wrong rows
PAST_ROWS = 2000  # assumed if a spec evaluates all past rows
SPEED = {True: 50e9, False: 60e12}
"""Assumed FLOPs per second: for small models on one core, as the toy models reach; for large ones on a GPU."""
OVERHEAD = 1.5


def flops(spec: Spec) -> float:
    """FLOPs of a run: forward and backward passes of training and evidence, forward passes of evaluation."""
    new = spec.num_new or NEW_ROWS
    trained = new * (2 if "replay" in spec.method else 1) * spec.epochs
    evidence = (spec.num_anchors + spec.num_probes) * spec.epochs
    if method(spec.method).refresh == 1:  # at every update
        evidence = spec.num_anchors * updates(spec)
    evaluated = 4 * PAST_ROWS
    if isinstance(spec, RunSpec):
        evaluated = (spec.num_past or PAST_ROWS) + new + len(spec.external) * (spec.external_limit or PAST_ROWS)
        evaluated *= 1 + (spec.epochs // spec.evaluate_every if spec.evaluate_every else 0)
        evidence = (evidence + PAST_ROWS * spec.epochs * spec.all_anchors) // spec.parts
        if {"reference", "audit"} & set(spec.diagnose):
            evidence += 2 * PAST_ROWS * (spec.epochs if "reference" in spec.diagnose else 4)
    stages = 1 if isinstance(spec, RunSpec) else len(spec.tasks)
    choices = 4 if spec.interface == "cloze" else 1
    size = PARAMETERS.get(spec.model, 1e9) * TOKENS[spec.interface]
    return stages * size * (6 * (trained + evidence) + 2 * evaluated * choices / 2)


def updates(spec: Spec) -> int:
    """The number of updates of a run."""
    stages = 1 if isinstance(spec, RunSpec) else len(spec.tasks)
    return stages * spec.epochs * -(-(spec.num_new or NEW_ROWS) // spec.batch_size)


def seconds(spec: Spec, known: Sequence[Result], speed: float | None = None) -> float:
    """The estimated time of a run: its FLOPs at the median rate of similar finished runs, else at this speed.

    `speed` is FLOPs per second as measured on the device; without it an assumed one is used.
    """
    own = flops(spec)
    rates: list[float] = [
        r.environment["wall_seconds"] / flops(r.spec) for r in similar(spec, known) if "wall_seconds" in r.environment
    ]
    if rates:
        return own * statistics.median(rates)
    return OVERHEAD + own / (speed or SPEED[PARAMETERS.get(spec.model, 1e9) < 200e6])


def similar(spec: Spec, known: Sequence[Result]) -> list[Result]:
    """The finished runs of the same model and kind, of the same method if there are any."""
    found = [r for r in known if r.spec.model == spec.model and type(r.spec) is type(spec)]
    return [r for r in found if r.spec.method == spec.method] or found


def memory(spec: Spec) -> float:
    """Bytes per worker: interpreter and libraries, then weights, gradients, moments, copy, evidence and average."""
    return 0.7e9 + 32 * PARAMETERS.get(spec.model, 1e9)


def workers_that_fit(workers: int, specs: Sequence[Spec], available: float) -> int:
    """The number of workers that fit into the available bytes, at least one.

    >>> spec = RunSpec(model="toy", task="", interface="cloze", method="sft", seed=0, num_anchors=0, num_probes=0)
    >>> workers_that_fit(8, [], 1e9), workers_that_fit(8, [spec], 3e9)
    (8, 4)
    """
    need = max((memory(spec) for spec in specs), default=0.0)
    return workers if not need else max(1, min(workers, int(available // need)))
