"""The state of a sharded training on disk: each process writes and reads its part, in any number of processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.tensor import DTensor

from cplus import files, world
from cplus.experiment.sharding import Held, like, of_parameters
from cplus.integrations.distributed import Reader
from cplus.ranks import local

REST = "rest.pt"
_STORED = "stored"
"""In the rest, where a tensor was: its path, which is its name in the checkpoint."""


def write(folder: Path, state: dict[str, Any], held: Held) -> dict[str, str]:
    """Write a training's state as every process holds it into a new folder; returns the hash of each file."""
    tensors: dict[str, Tensor] = {}

    def apart(value: Any, path: str) -> Any:
        if isinstance(value, DTensor):
            tensors[path] = value
            return {_STORED: path}
        if isinstance(value, dict):
            return {key: apart(inner, f"{path}/{key}") for key, inner in value.items()}
        if of_parameters(value, held.guarded):
            value = [like(part, p) for part, p in zip(value, held.guarded, strict=True)]
        if isinstance(value, list):
            return [apart(inner, f"{path}/{i}") for i, inner in enumerate(value)]
        return value

    rest = {key: apart(value, key) for key, value in state.items()}
    state_dict_saver.save(tensors, checkpoint_id=folder)
    if world.first():
        files.write_state(folder / REST, rest)
    world.gathered(None)  # every file is complete now
    return _hashes(folder)


def read(folder: Path, hashes: dict[str, str], held: Held) -> dict[str, Any]:
    """This process's part of a state that any number of processes wrote; a damaged file is refused."""
    damaged = [name for name, found in _hashes(folder).items() if hashes.get(name) != found]
    if damaged or (lost := hashes.keys() - {path.name for path in folder.iterdir()}):
        raise ValueError(f"{folder / sorted(damaged or lost)[0]} is damaged or missing")
    rest: dict[str, Any] = torch.load(folder / REST, map_location="cpu", weights_only=True)
    reader = Reader(folder)
    about = reader.read_metadata().state_dict_metadata
    tensors = {path: _empty(about[path], held.at(path)) for path in _stored(rest)}
    state_dict_loader.load(tensors, storage_reader=reader, no_dist=world.size() == 1)

    def whole(value: Any, part: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, dict):
            return part(tensors[value[_STORED]]) if value.keys() == {_STORED} else _each(value, whole, part)
        return [whole(inner, part) for inner in value] if isinstance(value, list) else value

    found = {key: whole(value, local if key == "guard" else lambda tensor: tensor) for key, value in rest.items()}
    if found["guard"] is not None:
        found["guard"]["ranks"] = world.size()
    return found


def _each(value: dict[Any, Any], change: Callable[..., Any], part: Callable[[Tensor], Tensor]) -> dict[Any, Any]:
    return {key: change(inner, part) for key, inner in value.items()}


def _stored(value: Any) -> Iterator[str]:
    """The paths of all stored tensors."""
    if isinstance(value, dict) and value.keys() == {_STORED}:
        yield value[_STORED]
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _stored(inner)


def _empty(about: Any, held: Tensor) -> Tensor:
    if about.size != held.shape:
        raise ValueError(f"expected a tensor of shape {tuple(held.shape)}, found {tuple(about.size)}")
    return like(torch.empty_like(local(held), dtype=about.properties.dtype), held)


def _hashes(folder: Path) -> dict[str, str]:
    """The hash of each file; the processes read some of them each."""
    names = world.shared(lambda: sorted(path.name for path in folder.iterdir()))

    def digest(name: str) -> tuple[str, str]:
        with (folder / name).open("rb") as file:
            return name, hashlib.file_digest(file, "sha256").hexdigest()

    return dict(world.spread(names, lambda own: [digest(name) for name in own]))
