"""Where a guard's state stays between two runs: beside a trainer's checkpoint, or inside the optimizer's own."""

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


def keep(guard: Guard, folder: Path, *, first: bool) -> None:
    """Write a guard's state into a checkpoint folder; every process calls it, `first` writes what is not sharded."""
    sharded = guard.where.sharded
    about = {"format": FORMAT, "weights": _sums(guard)}
    if sharded:
        from cplus.integrations import distributed

        distributed.save(guard, folder / FOLDER)
    elif first:
        write_state(folder / FILE, guard.state_dict())
    if first:
        write_json(folder / ABOUT, about)  # last: a folder that has it is complete


def take_up(guard: Guard, folder: Path) -> None:
    """Read a state written by `keep`; one kept at other weights than the model now holds is refused."""
    about = read_json(folder / ABOUT)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{folder / ABOUT}: expected the format {FORMAT}")
    now = _sums(guard)
    if about["weights"].keys() != now.keys() or any(
        not math.isclose(now[name], kept, rel_tol=1e-6, abs_tol=1e-6) for name, kept in about["weights"].items()
    ):
        raise ValueError(
            f"{folder} keeps the guard of other weights than the model holds; give the checkpoint the trainer resumed "
            "from as PreservationCallback(resume_from=...)"
        )
    if (folder / FOLDER).is_dir():
        from cplus.integrations import distributed

        distributed.load(guard, folder / FOLDER)
    elif guard.where.sharded and guard.where.world > 1:
        raise ValueError(
            f"{folder / FILE} was kept whole by one process and this run shards over {guard.where.world}; go on with "
            "one process, or keep it with cplus.integrations.distributed.save, which fits any number"
        )
    else:
        guard.load_state_dict(torch.load(folder / FILE, map_location=guard.params[0].device, weights_only=True))


def _sums(guard: Guard) -> dict[str, float]:
    """A cheap mark of the weights: each parameter's sum, over all shards."""
    sums = [p.detach().sum(dtype=torch.float64) for p in guard.params]
    whole = [s.full_tensor() if hasattr(s, "full_tensor") else s for s in sums]
    return {guard.names[id(p)]: float(s) for p, s in zip(guard.params, whole, strict=True)}


def carry(guard: Guard) -> None:
    """Let the guard's state travel in the optimizer's `state_dict`, under a key the optimizer itself never reads."""

    def add(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, FOLDER: guard.state_dict()}

    def take(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if FOLDER not in state:
            raise ValueError(
                "this optimizer state was kept without a guard's; sharded checkpoints lose it: use "
                "PreservationCallback, which keeps it beside them"
            )
        guard.load_state_dict(state[FOLDER])
        return {key: value for key, value in state.items() if key != FOLDER}

    guard.optimizer.register_state_dict_post_hook(add)
    guard.optimizer.register_load_state_dict_pre_hook(take)
