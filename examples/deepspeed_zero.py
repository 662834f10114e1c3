"""DeepSpeed ZeRO in several processes; two lines make it CPLUS.    deepspeed examples/deepspeed_zero.py"""

from __future__ import annotations

import deepspeed
import torch.distributed as dist
from material import arguments, material
from torch.optim import AdamW

import cplus
from cplus import models
from cplus.core.losses import answer_losses
from cplus.distributed import checkpoint


def main() -> None:
    """Learn new rows and keep the known ones, each process on its part of every batch."""
    options = arguments()
    deepspeed.init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    data = material(options) if rank == 0 else None
    shared = [data and (data.new, data.anchors, data.probes)]
    dist.broadcast_object_list(shared)  # all processes must hold the same rows
    rows, anchors, probes = shared[0]
    model = data.model if data else models.load(options.model).model
    config = {"train_micro_batch_size_per_gpu": options.batch // world, "zero_optimization": {"stage": 3}}
    optimizer = AdamW(model.parameters(), lr=options.lr)
    engine, optimizer, *_ = deepspeed.initialize(model=model.train(), optimizer=optimizer, config=config)
    guard = cplus.protect(optimizer, engine, anchors=anchors, probes=probes)  # +
    for epoch in range(options.epochs):
        print(f"epoch {epoch + 1}: {guard.refresh().losses}", flush=True)  # +
        for first in range(0, len(rows) - options.batch + 1, options.batch):
            engine.backward(answer_losses(engine, rows[first : first + options.batch][rank::world]).mean())
            engine.step()
    engine.save_checkpoint(options.out)
    checkpoint.save(guard, f"{options.out}/guard")


if __name__ == "__main__":
    main()
