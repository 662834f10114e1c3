"""A guard's state as a `torch.distributed.checkpoint`: kept by any number of processes, taken up by any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.tensor import DTensor

from cplus.attach import Guard
from cplus.ranks import local

PARAMETER = "@"  # marks the name of a parameter in a key
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def save(guard: Guard, folder: Path | str) -> None:
    """Write the guard's state; every process calls it, and each writes what it holds."""
    state = guard.state_dict()
    del state["ranks"]
    tensors = {key: _whole(value, guard) for key, value in _flat(state, guard, ())}
    dcp.save({key: value for key, (value, _) in tensors.items()}, checkpoint_id=folder, no_dist=not _running())


def load(guard: Guard, folder: Path | str) -> None:
    """Take up a state written by `save`, whatever the number of processes then and now; every process calls it."""
    if not (Path(folder) / ".metadata").is_file():
        raise ValueError(f"{folder}: expected a guard's distributed checkpoint, found no .metadata; write one with save")
    kept = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    params = {name: p for name, p in zip(names(guard), guard.params, strict=True)}
    wanted: dict[str, Tensor] = {}
    for key, about in kept.items():
        if isinstance(about, BytesStorageMetadata):
            raise ValueError(f"{folder}: {key!r} is not a tensor; expected a guard's distributed checkpoint")
        _, marked, name = key.partition(PARAMETER)
        if marked and (name not in params or tuple(about.size) != tuple(params[name].shape)):
            raise ValueError(f"{folder} belongs to other parameters: it holds {name!r} of shape {tuple(about.size)}")
        like = params[name] if marked else torch.empty(tuple(about.size))
        wanted[key] = _empty(like, about.properties.dtype)
    dcp.load(wanted, checkpoint_id=folder, no_dist=not _running())
    guard.load_state_dict(_nested(wanted, guard))


def names(guard: Guard) -> list[str]:
    """The parameters' names in the guard's order, without the marks of wrappers."""
    found = [guard.names[id(p)] for p in guard.params]
    for wrapper in WRAPPERS:
        found = [name.replace(wrapper, "") for name in found]
    return found


def _running() -> bool:
    return dist.is_available() and dist.is_initialized()
