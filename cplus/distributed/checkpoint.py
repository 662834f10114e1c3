"""A guard's state as a `torch.distributed.checkpoint`: saved and loaded by any number of processes.

Under DeepSpeed ZeRO each process writes a file of its own instead, because the partitions depend on their number."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader, state_dict_saver
from torch.distributed.tensor import DTensor

from cplus.base.files import write_state
from cplus.core.engine import local
from cplus.core.guard import Guard
from cplus.distributed.engines import Zero

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_NAMED: tuple[Any, ...] = (
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
    torch.serialization._get_layout,
)
_ADMITTED: dict[str, Any] = {
    **{f"{kind.__module__}.{kind.__qualname__}": kind for kind in _NAMED},
    **{str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)},
    **dict.fromkeys(("pathlib.PosixPath", "pathlib._local.PosixPath"), Path),  # the second: Python 3.13
}
"""What the metadata of tensors names; of other entries torch would load the pickle without restriction."""


def save(guard: Guard, folder: Path | str) -> None:
    """Write the guard's state; every process calls it and writes the part it holds."""
    if isinstance(guard.engine, Zero):
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_state(Path(folder) / _own(guard), {"rank": guard.engine.rank, "guard": guard.state_dict()})
        return
    state = guard.state_dict()
    del state["ranks"]
    state_dict_saver.save(dict(_flat(state, (), guard)), checkpoint_id=folder, no_dist=not _running())


def load(guard: Guard, folder: Path | str) -> None:
    """Restore a state written by `save`, by any number of processes; every process calls it."""
    if isinstance(guard.engine, Zero):
        _load_own(guard, Path(folder))
        return
    if not (Path(folder) / ".metadata").is_file():
        raise ValueError(f"{folder}: expected a guard's distributed checkpoint, but it has no .metadata file")
    reader = Reader(folder)
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    params = dict(zip(names(guard), guard.params, strict=True))
    loaded: dict[str, Tensor] = {}
    for key, about in saved.items():
        _, marked, name = key.partition("/@")
        if marked and (name not in params or about.size != params[name].shape):
            raise ValueError(f"{folder} belongs to other parameters: it has {name!r} of shape {tuple(about.size)}")
        loaded[key] = _empty_like(params[name] if marked else torch.empty(about.size), about.properties.dtype)
    state_dict_loader.load(loaded, storage_reader=reader, no_dist=not _running())
    template = guard.state_dict()
    ranks = template.pop("ranks")
    guard.load_state_dict({"ranks": ranks, **_filled(template, (), loaded, names(guard))})


class Reader(filesystem.FileSystemReader):
    """torch's reader, whose metadata is a pickle: here it may name nothing but what describes tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The checkpoint's metadata."""
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            found = _Restricted(file).load()
        if not isinstance(found, metadata.Metadata):
            raise ValueError(f"{path}: expected the metadata of a checkpoint, got {type(found).__name__}")
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _ADMITTED:
            raise ValueError(f"a checkpoint's metadata may not name {module}.{name}: the file was altered")
        return _ADMITTED[f"{module}.{name}"]


def _own(guard: Guard) -> str:
    return f"zero-{guard.engine.rank}-of-{guard.engine.world}.pt"


def _load_own(guard: Guard, folder: Path) -> None:
    """Restore this process's file; partitions of another number of processes have other coordinates."""
    if not (folder / _own(guard)).is_file():
        found = sorted(path.name for path in folder.glob("zero-*-of-*.pt"))
        written = f"{found[0].split('-')[3].removesuffix('.pt')} processes wrote" if found else "it does not have"
        raise ValueError(
            f"{folder}: expected ZeRO's state of {guard.engine.world} processes, which {written}; resume with the "
            "number of processes that saved it"
        )
    state = torch.load(folder / _own(guard), map_location=guard.params[0].device, weights_only=True)
    guard.load_state_dict(state["guard"])


def names(guard: Guard) -> list[str]:
    """The parameters' names in the guard's order, without the prefixes that wrappers add."""
    found = [guard.names[id(p)] for p in guard.params]
    for wrapper in WRAPPERS:
        found = [name.replace(wrapper, "") for name in found]
    return found


def _running() -> bool:
    return dist.is_available() and dist.is_initialized()


def _flat(value: Any, path: tuple[str, ...], guard: Guard) -> Iterator[tuple[str, Tensor]]:
    """Each tensor under its path; a tensor that belongs to a parameter has that parameter's name and sharding."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, (*path, key), guard)
    elif isinstance(value, list) and len(value) == len(guard.params) and isinstance(value[0], Tensor):
        for name, p, part in zip(names(guard), guard.params, value, strict=True):
            yield "/".join((*path, f"@{name}")), _sharded(part, p)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _flat(inner, (*path, str(i)), guard)
    elif value is not None:
        yield "/".join(path), torch.as_tensor(value)


def _filled(template: Any, path: tuple[str, ...], kept: dict[str, Tensor], order: list[str]) -> Any:
    """The template of a state, filled with the saved tensors."""
    here = "/".join(path)
    if isinstance(template, dict):
        return {key: _filled(inner, (*path, key), kept, order) for key, inner in template.items()}
    if isinstance(template, list):
        if f"{here}/@{order[0]}" in kept:
            return [local(kept[f"{here}/@{name}"]) for name in order]
        count = len({key[len(here) + 1 :].split("/")[0] for key in kept if key.startswith(f"{here}/")})
        return [_filled([], (*path, str(i)), kept, order) for i in range(count)]
    if template is None:
        return None
    return kept[here] if isinstance(template, Tensor) else int(kept[here])


def _sharded(part: Tensor, p: nn.Parameter) -> Tensor:
    if part.shape != local(p).shape:
        raise ValueError(f"a state of shape {tuple(part.shape)} does not fit a parameter of shape {tuple(p.shape)}")
    if not isinstance(p, DTensor):
        return part
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _empty_like(like: Tensor, dtype: torch.dtype) -> Tensor:
    empty = torch.empty_like(local(like), dtype=dtype)
    return _sharded(empty, like) if isinstance(like, nn.Parameter) else empty
