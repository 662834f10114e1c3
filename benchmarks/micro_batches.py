"""What it costs one process to compute a batch in parts: the processor's seconds of a backward pass, by parts.

OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= python benchmarks/micro_batches.py --out benchmarks/results/micro-batches.json

`short`: eight of the README's rows; `long`: eight rows of random tokens, 50 to 200 of them. The numbers of parts take
turns, so that a busy machine slows all of them alike. What is in the file already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from cplus import models
from cplus.base import files
from cplus.base.environment import environment
from cplus.core.passes import arrange
from cplus.core.rows import Encoded
from cplus.data import interfaces
from cplus.methods.objectives import answers
from cplus.methods.table import Material
from cplus.models import Loaded
from cplus.toy.world import untaught

PARTS = (1, 2, 4)
BATCH = 8
REPEATS = {"toy": 20, "smollm2-135m": 2}


def rows(base: Loaded) -> dict[str, list[Encoded]]:
    """A batch of short and one of long rows."""
    draw, bound = random.Random(0), interfaces.build("cloze", base.tokenizer, chat=False)
    vocabulary = base.model.config.vocab_size

    def some(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    long = [Encoded(some(draw.randrange(25, 101)), some(draw.randrange(25, 101))) for _ in range(BATCH)]
    return {"short": [bound.encode(example) for example in untaught("harbours")[:BATCH]], "long": long}


def measured(name: str) -> dict[str, Any]:
    """The median seconds by kind of rows and number of parts."""
    base = models.load(name, device="cpu")
    model = base.model.train().requires_grad_(True)
    found: dict[str, Any] = {}
    for kind, batch in rows(base).items():
        seconds: dict[int, list[float]] = {parts: [] for parts in PARTS}
        for _ in range(REPEATS[name]):
            for parts in PARTS:
                arrange(model, parts, 1)
                backward = answers(model, Material(new=batch))
                model.zero_grad(set_to_none=True)
                begun = time.process_time()
                backward(batch)
                seconds[parts].append(time.process_time() - begun)
        medians = {str(parts): statistics.median(own) for parts, own in seconds.items()}
        ratios = {parts: round(own / medians["1"], 3) for parts, own in medians.items()}
        found[kind] = {"tokens": [len(row) for row in batch], "seconds": medians, "of_one_part": ratios}
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = files.read_json(asked.out) if asked.out.is_file() else {}
    for name in [name for name in REPEATS if name not in report]:
        report |= {name: measured(name), "environment": environment(threads=1, device="cpu")}
        files.write_json(asked.out, report)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
