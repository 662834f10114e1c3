"""FSDP2 in several processes, kept as a distributed checkpoint that any number of them can take up.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from material import arguments, material
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import cplus
from cplus.integrations import distributed
from cplus.losses import answer_losses


def main() -> None:
    """Learn new facts and keep the known ones, each process on its part of every batch."""
    options = arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = material(options.new)
    model, rows = data.model.train(), list(data.new)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.0)
    guard = cplus.protect(optimizer, model, anchors=data.anchors, probes=data.probes)
    for epoch in range(options.epochs):
        found = guard.refresh()
        random.Random(epoch).shuffle(rows)
        for first in range(0, len(rows), 32):
            optimizer.zero_grad()
            answer_losses(model, rows[first : first + 32][rank::world]).mean().backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: {found.losses}, {guard.nbytes:,} bytes on this rank", flush=True)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=Path(options.out) / "training")
    distributed.save(guard, Path(options.out) / "guard")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
