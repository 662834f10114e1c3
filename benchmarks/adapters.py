"""Adapters with and without the gate, at three learning rates, in the demo's setting.

python benchmarks/adapters.py --seeds 5 --out benchmarks/results/adapters.json
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from cplus import adapters, models, run
from cplus.commands.demo import base_spec
from cplus.evaluate import estimate
from cplus.files import write_json
from cplus.methods import METHODS
from cplus.records import RunResult, environment

ROWS = ("sft", "cplus", "lora", "lora-cplus", "osf", "osf-cplus")
RATES = (5e-4, 1.5e-3, 5e-3)


def main() -> None:
    """Run every row at every rate and seed on shared splits, anchors and banks; print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/adapters.json"))
    parser.add_argument("--banks", type=Path, default=Path("runs/banks"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, adapter in (("lora-cplus", adapters.lora), ("osf-cplus", adapters.osf)):
        METHODS[name] = dataclasses.replace(METHODS["cplus"], name=name, adapter=adapter)
    base, first = models.load("toy"), base_spec("sft", 0)
    parted = run.part(base, first.task, first.interface)
    results: list[RunResult] = []
    for seed in range(options.seeds):
        setting = run.set_up(base_spec("sft", seed), base, parted, options.banks)
        for name in ROWS:
            for rate in RATES:
                results.append(run.run(dataclasses.replace(base_spec(name, seed), lr=rate), setting))
    table = [row(name, rate, results) for name in ROWS for rate in RATES]
    for own in table:
        cells = (f"{own[m]['mean']:5.1f} ± {own[m]['se']:.1f}" for m in ("retention", "acquisition", "external"))
        print(f"{own['method']:12} {own['lr']:.1e}", *cells, flush=True)
    stamp = environment(threads=1, device=str(base.device))
    write_json(options.out, {"seeds": options.seeds, "table": table, "environment": stamp})


def row(method: str, lr: float, results: list[RunResult]) -> dict[str, Any]:
    """Mean and standard error over the seeds of one method at one rate."""
    mine = [r for r in results if (r.spec.method, r.spec.lr) == (method, lr)]
    values = {
        "retention": [r.retention for r in mine],
        "acquisition": [r.acquisition for r in mine],
        "external": [float(r.external_kept or 0.0) for r in mine],
    }
    found = {name: estimate(own) for name, own in values.items()}
    return {"method": method, "lr": lr, **{n: {"mean": e.mean, "se": e.error or 0.0} for n, e in found.items()}}


if __name__ == "__main__":
    main()
