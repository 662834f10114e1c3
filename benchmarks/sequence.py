"""Three toy tasks learned one after another, by method and seed: `python benchmarks/sequence.py --out runs/sequence`.

A task is 160 facts of a domain that the model was taught and 160 that it was not; each stage learns what the model then
has wrong. The JSON on standard output holds the mean over seeds of Average Task Accuracy after every stage, of backward
transfer and of the last survival; every run's record lies in the output folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cplus import models
from cplus.base.files import write_text
from cplus.data.examples import lines
from cplus.evaluation.statistics import average_accuracy, backward_transfer, estimate
from cplus.lab.records import SequenceResult, save_result
from cplus.lab.sequence import first_stage, run_sequence
from cplus.toy import world
from cplus.training.settings import SequenceSpec

DOMAINS = ("harbours", "craftsmen", "plants")
METHODS = ("sft", "replay", "cpl", "cplus")
SPEC = SequenceSpec(
    model="toy",
    tasks=tuple(f"{domain}.jsonl" for domain in DOMAINS),
    interface="cloze",
    method="cplus",
    seed=0,
    num_anchors=8,
    num_probes=128,
    lr=1.5e-3,
    weight_decay=0.0,
    epochs=12,
    batch_size=32,
    order="shuffled",
)


VARIANTS = {
    "half": SPEC,
    "whole": replace(SPEC, tasks=DOMAINS, num_rows=640, num_new=96),
}
"""half: the model knows half of each task, and all that is wrong is learned. whole: it knows three quarters of a
domain, and 96 of the wrong rows are learned."""


def write_tasks(folder: Path, each: int = 160) -> None:
    """One file a domain, half of it known."""
    for domain in DOMAINS:
        write_text(folder / f"{domain}.jsonl", lines([*world.taught(domain)[:each], *world.untaught(domain)[:each]]))


def compare(spec: SequenceSpec, methods: Sequence[str], seeds: int, out: Path) -> list[SequenceResult]:
    """Every method from the same first checkpoint, seed by seed; the tasks are files of the folder `out`."""
    torch.set_num_threads(1)  # a model this small loses more to threads that wait for each other than it gains
    base = models.load(spec.model, device="cpu")
    results = []
    with contextlib.chdir(out):
        for seed in range(seeds):
            first = first_stage(replace(spec, seed=seed), base)
            for method in methods:
                own = replace(spec, method=method, seed=seed)
                results.append(run_sequence(own, base, Path("banks"), first=first))
                save_result(results[-1], Path("records"))
                print(line(results[-1]), file=sys.stderr, flush=True)
    return results


def line(result: SequenceResult) -> str:
    """One sequence in words."""
    after = ", ".join(f"{average_accuracy(result.accuracy, k):.1f}" for k in range(1, len(result.accuracy)))
    return f"seed {result.spec.seed} {result.spec.method}: average accuracy {after}; {result.seconds:.0f} s"


def summary(results: Sequence[SequenceResult]) -> dict[str, Any]:
    """Means and standard errors over seeds, by method."""
    table: dict[str, Any] = {}
    for method in dict.fromkeys(result.spec.method for result in results):
        mine = [result for result in results if result.spec.method == method]
        stages = range(1, len(mine[0].accuracy))
        table[method] = {
            "average_accuracy": [_mean([average_accuracy(r.accuracy, k) for r in mine]) for k in stages],
            "backward_transfer": _mean([backward_transfer(r.accuracy) or 0.0 for r in mine]),
            "survival": _mean([r.survival[-1] for r in mine]),
            "last": {task: _mean([r.accuracy[-1][i] for r in mine]) for i, task in enumerate(mine[0].spec.tasks)},
            "acquisition": _mean([s["acquisition"] for r in mine for s in r.stages[1:]]),
            "seconds": _mean([r.seconds for r in mine]),
        }
    return table


def _mean(values: Sequence[float]) -> dict[str, float]:
    found = estimate(values)
    return {"mean": found.mean, "error": found.error or 0.0}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/sequence"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, default="half")
    parser.add_argument("--methods", default=",".join(METHODS))
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    write_tasks(options.out)
    print(
        json.dumps(summary(compare(VARIANTS[options.variant], options.methods.split(","), options.seeds, options.out)))
    )
