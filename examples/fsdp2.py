"""FSDP2 in several processes, kept as a distributed checkpoint that any number of them can take up.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

from __future__ import annotations

import os
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from material import arguments, material
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import cplus
from cplus import models
from cplus.core.losses import answer_losses
from cplus.distributed import checkpoint


def main() -> None:
    """Learn new rows and keep the known ones, each process on its part of every batch."""
    options = arguments()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(hours=2))
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.batch % world:
        raise ValueError(f"expected a batch that {world} processes can share equally, got {options.batch}")
    # The first process asks the model and lets it write the probes; all of them must hold the same rows.
    data = material(options) if rank == 0 else None
    shared = [data and (data.new, data.anchors, data.probes)]
    dist.broadcast_object_list(shared)
    rows, anchors, probes = shared[0]
    model = data.model if data else models.load(options.model).model
    shard(model.train(), torch.bfloat16 if gpu else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    guard = cplus.protect(optimizer, model, anchors=anchors, probes=probes)
    for epoch in range(options.epochs):
        found = guard.refresh()
        random.Random(epoch).shuffle(rows)
        even = rows[: len(rows) // world * world]  # a rest that not all processes could share waits for its turn
        for first in range(0, len(even), options.batch):
            optimizer.zero_grad()
            answer_losses(model, even[first : first + options.batch][rank::world]).mean().backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: {found.losses}, {guard.nbytes:,} bytes on this rank", flush=True)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=Path(options.out) / "training")
    checkpoint.save(guard, Path(options.out) / "guard")
    dist.destroy_process_group()


def shard(model: Any, compute: torch.dtype) -> None:
    """Every layer by itself, then the rest; float32 weights, passes in `compute`."""
    policy = MixedPrecisionPolicy(param_dtype=compute)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


if __name__ == "__main__":
    main()
