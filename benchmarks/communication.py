"""Bytes that each process moves per update as the world grows: by formula, and counted on two processes.

OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= python benchmarks/communication.py --out benchmarks/results

A pass over rows is a forward and a backward pass. FSDP2 gathers the weights of a block for each of the two, those
outside the blocks once, and sums the gradient of all once. By a ring, a process sends (n - 1) / n of what is gathered
or scattered, and twice that of what is summed in every process.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import ended, started
from timing import finish, options
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cplus import models
from cplus.base.files import read_json
from cplus.data import interfaces
from cplus.distributed import processes as world
from cplus.methods.table import METHODS, Material, Past
from cplus.toy.world import taught, untaught
from cplus.training.driver import start
from cplus.training.loop import EpochEnded, Refreshed
from cplus.training.settings import TrainSettings
from cplus.training.sharding import sharded

TIMES = {
    "all_gather_single": ("output", 1),
    "all_gather_into_tensor": ("output", 1),
    "reduce_scatter_single": ("input", 1),
    "reduce_scatter_tensor": ("input", 1),
    "all_reduce": ("tensor", 2),
}
"""The tensor that a collective moves, and how often a ring sends it."""
WORLDS = (1, 2, 4, 8)
BATCH, TOKENS = 8, 190
MODELS = ("toy", "smollm2-135m", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")
SHAPES = {  # layers, width, inner width, key-value width, query width, vocabulary: the published configurations
    "qwen3-0.6b": (28, 1024, 3072, 1024, 2048, 151936),
    "qwen3-1.7b": (28, 2048, 6144, 1024, 2048, 151936),
    "qwen3-4b": (36, 2560, 9728, 1024, 4096, 151936),
}


def moved(blocks: int, rest: int, processes: int, passes: int = 1) -> float:
    """Bytes that a process sends in so many passes; parameters are inside or outside the blocks."""
    return passes * 4 * (3 * blocks + 2 * rest) * (processes - 1) / processes


def split(model: nn.Module) -> tuple[int, int]:
    """The parameters inside the blocks that are sharded one by one, and all others."""
    kinds = set(model._no_split_modules or ())  # type: ignore[arg-type]
    inside = sum(p.numel() for m in model.modules() if type(m).__name__ in kinds for p in m.parameters())
    return inside, sum(p.numel() for p in model.parameters()) - inside


def sizes(name: str) -> tuple[int, int]:
    """The parameters of a model inside and outside its blocks, without its weights."""
    if name in SHAPES:
        layers, width, inner, keys, queries, vocabulary = SHAPES[name]
        block = 2 * width * queries + 2 * width * keys + 3 * width * inner + 2 * width + 2 * 128
        return layers * block, vocabulary * width + width
    with torch.device("meta"):
        return split(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models.resolve(name))))


def count(counts: Counter[str]) -> None:
    """Count what every collective of this process moves, by its name."""

    def counting(name: str, real: Callable[..., Any], which: str, times: int) -> Callable[..., Any]:
        signature = inspect.signature(real)

        @wraps(real)
        def call(*args: Any, **named: Any) -> Any:
            given = signature.bind(*args, **named).arguments
            tensor = next(value for key, value in given.items() if key.startswith(which))
            size = dist.get_world_size()
            counts[name] += round(times * tensor.nbytes * (size - 1) / size)
            return real(*args, **named)

        return call

    for name, (which, times) in TIMES.items():
        if hasattr(dist, name):
            setattr(dist, name, counting(name, getattr(dist, name), which, times))


def measured(place: Path, rank: int) -> None:
    """Train the toy on this process's shards, and write what was moved by refreshes and by updates."""
    torch.set_num_threads(1)
    with world.joined():
        base = models.load("toy", device="cpu")
        bound = interfaces.build("cloze", base.tokenizer, chat=False)
        known, new = taught("harbours"), untaught("harbours")[:16]
        past = Past(name="past", anchors=[*map(bound.encode, known[:8])], probes=[*map(bound.encode, known[8:32])])
        material = Material(new=[*map(bound.encode, new)], past=(past,))
        settings = TrainSettings(method="cplus", epochs=2, lr=1e-3, warmup_steps=0, clip_norm=0.0)
        inside, outside = split(base.model)
        counts: Counter[str] = Counter()
        training = start(settings, METHODS["cplus"], base.model, material, sharded)
        count(counts)
        found: dict[str, list[dict[str, int]]] = {"refresh": [], "update": []}
        for event in training.run():
            if not isinstance(event, EpochEnded):
                found["refresh" if isinstance(event, Refreshed) else "update"].append(dict(counts))
            counts.clear()
    if rank == 0:
        place.write_text(json.dumps({"blocks": inside, "rest": outside, **found}), encoding="utf-8")


def table() -> list[dict[str, Any]]:
    """Megabytes sent and FLOPs computed by each process per update of one pass."""
    rows = []
    for name in MODELS:
        inside, outside = sizes(name)
        for processes in WORLDS:
            sent, flops = moved(inside, outside, processes), 6 * (inside + outside) * BATCH * TOKENS / processes
            row = {"model": name, "processes": processes, "sent_megabytes": sent / 1e6, "teraflops": flops / 1e12}
            rows.append({**row, "flops_per_byte": flops / sent if sent else None})
    return rows


def main() -> None:
    """Count, compare with the formula, write."""
    asked = options(__doc__)
    with tempfile.TemporaryDirectory() as made:
        place = Path(made) / "counts.json"
        codes = ended(started(2, lambda rank: measured(place, rank)))
        if any(codes):
            sys.exit(f"the processes ended with {codes}")
        found = read_json(place)
    formula = moved(found["blocks"], found["rest"], 2)
    update, refresh = (sum(found[part][-1].values()) for part in ("update", "refresh"))
    checked = {
        "model": "toy",
        "processes": 2,
        "parameters": {"blocks": found["blocks"], "rest": found["rest"]},
        "update_counted": update,
        "update_by_formula": formula,
        "update_difference": update / formula - 1,
        "refresh_counted": refresh,
        "refresh_passes": refresh / formula,
        "by_collective": {"update": found["update"][-1], "refresh": found["refresh"][-1]},
    }
    report = {"checked": checked, "batch": BATCH, "tokens_per_row": TOKENS, "table": table()}
    finish("communication", report, asked.out)


if __name__ == "__main__":
    main()
