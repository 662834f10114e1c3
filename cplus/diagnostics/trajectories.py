"""The masks of all references over one replay of proposals, stored as a few sums per coordinate.

With the weights frozen, a reference is one fixed sign per coordinate: plus, minus or zero. All references therefore
share three mask trajectories: that of plus (1 where delta <= 0), of minus (1 where delta >= 0) and of zero (always 1),
each binary or smoothed. The sums measure the differences between these trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cplus.algorithm import coefficient, collaborates, smooth
from cplus.data.encoded import Encoded
from cplus.diagnostics.measures import BLOCK
from cplus.diagnostics.proposals import proposals
from cplus.diagnostics.scratch import Shelf
from cplus.offload import free_bytes
from cplus.support import trainable

Table: TypeAlias = dict[tuple[int, int], Tensor]
KEPT = ("up", "down", "opposite", "plus", "minus", "plus_binary", "minus_binary", "ema_plus", "ema_minus")
"""Sums over steps of delta^2 times [delta > 0], [delta < 0], |c+ - c-|, 1 - c+, 1 - c-, |c+ - m+| and |c- - m-|, and
the two moving averages; c+ and m+ are the coefficient and the binary mask of a plus reference."""


BYTES = 4 * len(KEPT)
"""Bytes per coordinate of the sums."""


def replay(
    shelf: Shelf,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Sequence[Encoded]],
    *,
    beta: float,
    room: int | None = None,
) -> int:
    """Propose one update per batch, with the weights frozen and the moments advancing; return the number of updates.

    Paper: App. E.8; App. E.11, a common sequence of proposed updates. The sums are collected in memory and stored
    once; where only some of the parameters' sums fit into it, the same updates are proposed again for the others.
    """
    params = trainable(optimizer)
    sizes = [p.numel() for p in params]
    place, space = working_memory(BYTES * sum(sizes), params[0].device) if room is None else (params[0].device, room)
    t = 0
    for number, group in enumerate(groups(sizes, space // BYTES)):
        if number:
            optimizer.state.clear()  # the moments start again, as they did for the first group
        sums = {i: {name: torch.zeros(sizes[i], device=place) for name in KEPT} for i in group}
        for t, rows in enumerate(batches, start=1):
            for i, (theta, proposed) in enumerate(proposals(model, optimizer, rows, advance=True)):
                if i in sums:
                    _add(sums[i], theta.reshape(-1), proposed.reshape(-1), beta=beta, t=t)
        for i in group:
            for name, values in sums.pop(i).items():
                shelf.put(f"{name}-{i}", values)
    return t


def working_memory(need: int, device: torch.device) -> tuple[torch.device, int]:
    """Where sums are collected: on the device if half of its free memory suffices, else in the host's memory."""
    if need <= free_bytes(device) // 2:
        return device, need
    host = torch.device("cpu")
    return host, min(need, free_bytes(host) // 2)


def groups(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Positions of consecutive tensors that have room together; one that is larger than the room is alone.

    >>> groups([3, 4, 9, 1], 8)
    [[0, 1], [2], [3]]
    """
    found: list[list[int]] = []
    left = 0
    for position, size in enumerate(sizes):
        if not found or size > left:
            found.append([])
            left = room
        found[-1].append(position)
        left -= size
    return found


def _add(sums: dict[str, Tensor], old: Tensor, new: Tensor, *, beta: float, t: int) -> None:
    """Add one step of one tensor to its sums, block by block."""
    for start in range(0, old.numel(), BLOCK):
        stop = start + BLOCK
        delta = new[start:stop].double() - old[start:stop].double()
        accumulate({name: own[start:stop] for name, own in sums.items()}, delta.to(sums["up"].device), beta=beta, t=t)


def accumulate(sums: dict[str, Tensor], delta: Tensor, *, beta: float, t: int) -> None:
    """Add one step's part of a tensor to the sums, in place."""
    energy, one = delta.square(), torch.ones((), device=delta.device)
    masks = {"plus": collaborates(one, delta).double(), "minus": collaborates(-one, delta).double()}
    c = {}
    for sign, mask in masks.items():
        average = smooth(sums[f"ema_{sign}"].double(), mask, beta)
        sums[f"ema_{sign}"].copy_(average)
        c[sign] = coefficient(average, beta, t)
    found = {
        "up": energy * (delta > 0),
        "down": energy * (delta < 0),
        "opposite": energy * (c["plus"] - c["minus"]).abs(),
        "plus": energy * (1.0 - c["plus"]),
        "minus": energy * (1.0 - c["minus"]),
        "plus_binary": energy * (c["plus"] - masks["plus"]).abs(),
        "minus_binary": energy * (c["minus"] - masks["minus"]).abs(),
    }
    for name, values in found.items():
        sums[name].copy_(sums[name].double() + values)


def tables(sums: dict[str, Tensor]) -> dict[str, Table]:
    """The difference between two trajectories at each coordinate, by the signs of their references.

    `binary`: two binary masks. `smoothed`: two smoothed masks. `crossed`: a smoothed and a binary mask.
    """
    up, down, plus, minus, opposite = (sums[name] for name in ("up", "down", "plus", "minus", "opposite"))
    energy, to_plus, to_minus = up + down, sums["plus_binary"], sums["minus_binary"]
    return {
        "binary": {(1, -1): energy, (-1, 1): energy, (1, 0): up, (0, 1): up, (-1, 0): down, (0, -1): down},
        "smoothed": {(1, -1): opposite, (-1, 1): opposite, (1, 0): plus, (0, 1): plus, (-1, 0): minus, (0, -1): minus},
        "crossed": {
            (1, 1): to_plus,
            (1, -1): energy - to_plus,  # the two binary masks are complements wherever delta is not 0
            (-1, -1): to_minus,
            (-1, 1): energy - to_minus,
            (1, 0): plus,
            (-1, 0): minus,
            (0, 1): up,
            (0, -1): down,
        },
    }


def distance(table: Table, first: Tensor, second: Tensor) -> float:
    """The energy on which the trajectories of two references' signs differ."""
    return sum(float(values[(first == a) & (second == b)].sum()) for (a, b), values in table.items())


def mean_coefficients(signs: Tensor, sums: dict[str, Tensor]) -> Tensor:
    """Each coordinate's update-weighted mean of the smoothed mask; 1 where nothing was proposed.

    Paper: App. E.11.    sum_t delta^2 c / sum_t delta^2
    """
    energy = sums["up"] + sums["down"]
    lost = torch.where(signs > 0, sums["plus"], torch.where(signs < 0, sums["minus"], 0.0))
    return torch.where(energy > 0, 1.0 - lost / energy.clamp(min=torch.finfo(energy.dtype).tiny), 1.0)
