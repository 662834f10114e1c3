"""Data-parallel training: the part of a tensor this process holds, the rows it sees, and sums over processes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """This process's place among those that train one model; a single process is rank 0 of 1."""

    rank: int = 0
    world: int = 1
    sharded: bool = False

    def rows(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Every world-th row.

        >>> Layout(rank=1, world=2).rows("abcde")
        'bd'
        """
        return rows[self.rank :: self.world]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, in place; every process must call it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def sums(self, values: Sequence[float], device: torch.device) -> list[float]:
        """Each number's sum over the processes; a NaN in one process gives NaN in all."""
        if self.world == 1:
            return list(values)
        return self.sum(torch.tensor(values, dtype=torch.float64, device=device)).tolist()

    def check_alike(self, value: object, what: str, device: torch.device) -> None:
        """Refuse, in every process, a value that differs between processes."""
        if self.world == 1:
            return
        mark = float(zlib.crc32(repr(value).encode()) & 0xFFFFF)  # small enough for exact squares in float64
        total, squares = self.sums([mark, mark * mark], device)
        if squares * self.world != total * total:
            raise ValueError(
                f"the {self.world} processes hold different {what}; create them in one process and distribute them"
            )


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, detached and sharing memory; all of a plain tensor."""
    detached = tensor.detach()
    # DTensor is detected by its method: importing the class would cost every run a second.
    return detached.to_local() if hasattr(detached, "to_local") else detached


def every_part(p: Tensor, world: int, least: int = 4) -> bool:
    """Whether each process's part of a tensor, split by its first dimension as FSDP2 does, has so many coordinates."""
    rows = -(-p.shape[0] // world) if p.ndim else 0
    last = p.shape[0] - (world - 1) * rows if rows else 0
    return last * (p.numel() // max(1, p.shape[0] if p.ndim else 1)) >= least


def local_rows(rows: Tensor, p: Tensor) -> Tensor:
    """The part of a vector with one entry for each row of `p` that belongs to the rows this process holds."""
    if not hasattr(p, "device_mesh"):
        return rows
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    assert isinstance(p, DTensor)
    placements = [place if place.is_shard(0) else Replicate() for place in p.placements]
    spread = distribute_tensor(rows.to(p.device), p.device_mesh, placements, src_data_rank=None)  # every process has it
    return spread.to_local()


def layout(params: Sequence[nn.Parameter], names: dict[int, str]) -> Layout:
    """How these parameters are distributed; anything but replicas and shards of FSDP2 or ZeRO is refused."""
    running = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
    if any(hasattr(p, "zero_partition") for p in params):
        return Layout(rank=rank, world=world, sharded=True)
    spread = [p for p in params if hasattr(p, "device_mesh")]
    if not spread:
        return Layout(rank=rank, world=world)
    plain = [p for p in params if not hasattr(p, "device_mesh")]
    if plain:
        raise TypeError(
            f"{names.get(id(plain[0]), 'a parameter')!r} is a plain tensor beside {len(spread)} sharded ones; add "
            "adapters first, then call fully_shard on every trained module"
        )
    for p in spread:
        _check_placement(p, names.get(id(p), "a parameter"), world)
    return Layout(rank=rank, world=world, sharded=True)


def _check_placement(p: nn.Parameter, name: str, world: int) -> None:
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    shards = [x for x in placements if not x.is_replicate()]
    if len(shards) > 1 or any(x.is_partial() for x in shards):
        raise TypeError(
            f"{name!r} is placed as {tuple(map(str, placements))}: tensor parallelism is not supported; train with "
            "FSDP2 (fully_shard) alone"
        )
    if mesh.size() != world:
        raise TypeError(
            f"{name!r} is sharded over {mesh.size()} of {world} processes; the gate needs one mesh over all of them"
        )
