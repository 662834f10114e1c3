"""A model over several processes: sharded by FSDP2 or copied, and its state on disk."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_with_path

from cplus.base import files
from cplus.base.environment import give_back, give_back_at_once
from cplus.core.engine import local
from cplus.distributed import processes
from cplus.distributed.checkpoint import Reader
from cplus.methods.table import ANSWERS, Method

# A model over several processes: sharded by FSDP2 or copied, and its state as that of one process.


Place: TypeAlias = Callable[[nn.Module], "nn.Module | None"]
"""Distributes a model in place and returns its twin: the same model without weights, or None where it stays whole."""


def copied(model: nn.Module) -> None:
    """Every process keeps the whole model."""


def sharded(model: nn.Module) -> nn.Module | None:
    """Every process keeps its part of each weight: FSDP2, block by block; one process keeps everything."""
    if processes.size() == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    give_back_at_once()
    twin = _without_weights(model)
    mesh = init_device_mesh(next(model.parameters()).device.type, (processes.size(),))
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    blocks = set(getattr(base, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    give_back()  # the whole weights
    return twin


PLACES: dict[str, Place] = {"fsdp": sharded, "ddp": copied}


def needs_whole(method: Method, seed: int) -> bool:
    """Whether a method needs whole weights in every process."""
    gate = method.build_gate(seed)
    whole = method.projection is not None or method.memory > 0 or (gate is not None and gate.whole)
    return whole or method.after is not None or method.adapter is not None or method.objective != ANSWERS


def _without_weights(model: nn.Module) -> nn.Module:
    """A copy whose parameters have shapes only; tied ones stay tied."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, {**empty})


@torch.no_grad()
def gathered(model: nn.Module, twin: nn.Module) -> nn.Module:
    """The whole model in every process, as the twin with the weights of all; the caller frees it by `emptied`."""
    whole = {name: _whole(p) for name, p in model.named_parameters()}
    _replace(twin, lambda name, p: nn.Parameter(whole[name], p.requires_grad))
    return twin.train(model.training)


def emptied(twin: nn.Module) -> None:
    """Give back the memory of the twin's weights."""
    _replace(twin, lambda name, p: nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad))
    give_back()


def _replace(module: nn.Module, made: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put other parameters in the place of a module's; a tied one is made once, under its first name."""
    known = {id(p): made(name, p) for name, p in module.named_parameters()}
    for name, p in list(module.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, known[id(p)])


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor, in every process."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach().clone()


def one_weights(weights: dict[str, Tensor]) -> dict[str, Any]:
    """Whole weights in the first process's memory; every process takes part."""
    whole = ((name, _whole(value)) for name, value in weights.items())
    return {name: value.cpu() if processes.first() else None for name, value in whole}


def own_weights(weights: dict[str, Tensor], held: dict[str, Tensor]) -> dict[str, Tensor]:
    """This process's part of whole weights, placed like those it holds."""
    return {name: _part(value, held[name]) for name, value in weights.items()}


@dataclass(frozen=True, kw_only=True)
class Held:
    """What this process holds of the weights by name, and of the optimizer's and the guard's parameters by number."""

    weights: dict[str, Tensor]
    optimized: Sequence[nn.Parameter]
    guarded: Sequence[nn.Parameter]

    def at(self, path: str) -> Tensor:
        """The tensor that the one of this path is sharded like."""
        kind, *keys = path.split("/")
        if kind == "weights":
            return self.weights["/".join(keys)]
        return self.optimized[int(keys[1])] if kind == "optimizer" else self.guarded[int(keys[-1])]


def own_state(state: dict[str, Any], held: Held) -> dict[str, Any]:
    """This process's part of the state of one process."""
    moments = {
        i: {name: _part(value, held.optimized[i]) for name, value in own.items()}
        for i, own in state["optimizer"]["state"].items()
    }

    guarded = held.guarded

    def cut(value: Any) -> Any:
        if not of_parameters(value, guarded):
            return value
        return [local(_part(part, p)) for part, p in zip(value, guarded, strict=True)]

    guard = state["guard"]
    return {
        **state,
        "weights": own_weights(state["weights"], held.weights),
        "optimizer": {**state["optimizer"], "state": moments},
        "guard": None if guard is None else {**in_lists(cut, guard, guarded), "ranks": processes.size()},
    }


def of_parameters(value: Any, params: Sequence[nn.Parameter]) -> bool:
    """Whether a value is a list with one tensor for each parameter."""
    return isinstance(value, list) and len(value) == len(params) and all(isinstance(part, Tensor) for part in value)


def in_lists(change: Callable[[Any], Any], state: Any, params: Sequence[nn.Parameter]) -> Any:
    """The state with each list of one tensor per parameter, and each other value, changed."""
    return tree_map(change, state, is_leaf=lambda value: of_parameters(value, params))


def like(part: Tensor, p: Tensor) -> Tensor:
    """This process's part of something that is sharded like the parameter."""
    if not isinstance(p, DTensor):
        return part
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this process holds of one like it; nothing is sent."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole.clone()
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


# The state of a sharded training on disk: each process writes and reads its part, in any number of processes.


REST = "rest.pt"
_STORED = "stored"
"""In the rest, where a tensor was: its path, which is its name in the checkpoint."""


def write(folder: Path, state: dict[str, Any], held: Held) -> dict[str, str]:
    """Write a training's state as every process holds it into a new folder; returns the hash of each file."""
    tensors: dict[str, Tensor] = {}

    def apart(path: Any, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        name = "/".join(str(getattr(key, "key", getattr(key, "idx", ""))) for key in path)
        tensors[name] = value
        return {_STORED: name}

    def sharded(value: Any) -> Any:
        if not of_parameters(value, held.guarded):
            return value
        return [like(part, p) for part, p in zip(value, held.guarded, strict=True)]

    rest = tree_map_with_path(apart, in_lists(sharded, state, held.guarded))
    state_dict_saver.save(tensors, checkpoint_id=folder)
    if processes.first():
        files.write_state(folder / REST, rest)
    processes.gathered(None)  # every file is complete now
    return _hashes(folder)


def read(folder: Path, hashes: dict[str, str], held: Held) -> dict[str, Any]:
    """This process's part of a state that any number of processes wrote; a damaged file is refused."""
    damaged = [name for name, found in _hashes(folder).items() if hashes.get(name) != found]
    if damaged or (lost := hashes.keys() - {path.name for path in folder.iterdir()}):
        raise ValueError(f"{folder / sorted(damaged or lost)[0]} is damaged or missing")
    rest: dict[str, Any] = torch.load(folder / REST, map_location="cpu", weights_only=True)
    reader = Reader(folder)
    about = reader.read_metadata().state_dict_metadata
    paths = [leaf[_STORED] for leaf in tree_leaves(rest, is_leaf=_is_stored) if _is_stored(leaf)]
    tensors = {path: _empty(about[path], held.at(path)) for path in paths}
    state_dict_loader.load(tensors, storage_reader=reader, no_dist=processes.size() == 1)

    def back(value: Any) -> Any:
        if not _is_stored(value):
            return value
        path = value[_STORED]
        return local(tensors[path]) if path.startswith("guard/") else tensors[path]

    found: dict[str, Any] = tree_map(back, rest, is_leaf=_is_stored)
    if found["guard"] is not None:
        found["guard"]["ranks"] = processes.size()
    return found


def _is_stored(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_STORED}


def _empty(about: Any, held: Tensor) -> Tensor:
    if about.size != held.shape:
        raise ValueError(f"expected a tensor of shape {tuple(held.shape)}, found {tuple(about.size)}")
    return like(torch.empty_like(local(held), dtype=about.properties.dtype), held)


def _hashes(folder: Path) -> dict[str, str]:
    """The hash of each file; the processes read some of them each."""
    names = processes.shared(lambda: sorted(path.name for path in folder.iterdir()))

    def digest(name: str) -> tuple[str, str]:
        with (folder / name).open("rb") as file:
            return name, hashlib.file_digest(file, "sha256").hexdigest()

    return dict(processes.spread(names, lambda own: [digest(name) for name in own]))
