"""Saving a guard's state between runs: in a trainer's checkpoint, or inside the optimizer's own state."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from cplus.attach import Guard
from cplus.files import read_json, write_json, write_state

FORMAT = "cplus-guard/1"
FILE, FOLDER, ABOUT = "cplus_guard.pt", "cplus_guard", "cplus_guard.json"


def save_guard(guard: Guard, folder: Path, *, first: bool) -> None:
    """Write a guard's state into a checkpoint folder; called by every process, the `first` writes what is unsharded."""
    sharded = guard.where.sharded
    about = {"format": FORMAT, "weights": _sums(guard)}
    if sharded:
        from cplus.integrations import distributed

        distributed.save(guard, folder / FOLDER)
    elif first:
        write_state(folder / FILE, guard.state_dict())
    if first:
        write_json(folder / ABOUT, about)  # written last: a folder that has it is complete


def load_guard(guard: Guard, folder: Path) -> None:
    """Restore a state written by `save_guard`; refuse one that was saved with other weights than the model has now."""
    about = read_json(folder / ABOUT)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{folder / ABOUT}: expected the format {FORMAT}; it was written by another version")
    now = _sums(guard)
    if about["weights"].keys() != now.keys() or any(
        not math.isclose(now[name], kept, rel_tol=1e-6, abs_tol=1e-6) for name, kept in about["weights"].items()
    ):
        raise ValueError(
            f"{folder} has the guard state of other weights than the model's; pass the checkpoint that the trainer "
            "resumed from as PreservationCallback(resume_from=...)"
        )
    if (folder / FOLDER).is_dir():
        from cplus.integrations import distributed

        distributed.load(guard, folder / FOLDER)
    elif guard.where.sharded and guard.where.world > 1:
        raise ValueError(
            f"{folder / FILE} was saved by one process and this run shards over {guard.where.world}; continue with one "
            "process, or save it with cplus.integrations.distributed.save, which supports any number of processes"
        )
    else:
        guard.load_state_dict(torch.load(folder / FILE, map_location="cpu", weights_only=True))


def _sums(guard: Guard) -> dict[str, float]:
    """A cheap fingerprint of the weights: the sum of each parameter or ZeRO partition, over all shards."""
    if guard.zero is not None:
        own = guard.zero.sums()
        return dict(zip(own, guard.where.sums(list(own.values()), guard.params[0].device), strict=True))
    sums = [p.detach().sum(dtype=torch.float64) for p in guard.params]
    whole = [s.full_tensor() if hasattr(s, "full_tensor") else s for s in sums]
    return {guard.names[id(p)]: float(s) for p, s in zip(guard.params, whole, strict=True)}


def carry(guard: Guard) -> None:
    """Store the guard's state in the optimizer's `state_dict`, under a key that the optimizer itself never reads."""

    def add(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, FOLDER: guard.state_dict()}

    def take(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if FOLDER not in state:
            raise ValueError(
                "this optimizer state was saved without a guard state, which sharded checkpoints drop; use "
                "PreservationCallback, which saves it separately"
            )
        guard.load_state_dict(state[FOLDER])
        return {key: value for key, value in state.items() if key != FOLDER}

    guard.optimizer.register_state_dict_post_hook(add)
    guard.optimizer.register_load_state_dict_pre_hook(take)
