"""Tensors stored where there is room, so that an observer needs little of the memory that training uses."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cplus.offload import free_bytes


class Shelf:
    """Scratch files in the system's temporary folder (TMPDIR), removed when the shelf is closed.

    With a GPU the tensors stay there, if `need` bytes are at most a quarter of its free memory: what is read at every
    step would otherwise pass over the disk and the bus each time.
    """

    def __init__(self, need: int = 0, device: torch.device | None = None) -> None:
        gpu = device if device is not None and device.type != "cpu" else None
        self._device = gpu if gpu is not None and need <= free_bytes(gpu) // 4 else None
        where = tempfile.gettempdir()
        if self._device is None and need > (free := shutil.disk_usage(where).free):
            raise ValueError(
                f"this diagnostic needs {need / 1e9:.1f} GB of scratch, but {where} has {free / 1e9:.1f} GB free; set "
                "TMPDIR to a folder on a larger disk"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="cplus-shelf-")
        self._kinds: dict[str, tuple[np.dtype[np.generic], torch.Size]] = {}
        self._tensors: dict[str, Tensor] = {}

    def put(self, key: str, tensor: Tensor) -> None:
        """Store a tensor, replacing any with the same key."""
        if self._device is not None:
            self._tensors[key] = tensor.detach().to(self._device, copy=True)
            return
        values = tensor.detach().cpu().contiguous().numpy()
        values.tofile(self._path(key))
        self._kinds[key] = (values.dtype, tensor.shape)

    def get(self, key: str, device: torch.device) -> Tensor:
        """Read a tensor back; the caller does not change it."""
        if self._device is not None:
            return self._tensors[key].to(device)
        kind, shape = self._kinds[key]
        return torch.from_numpy(np.fromfile(self._path(key), dtype=kind)).view(shape).to(device)

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Some coordinates of the flat tensor."""
        if self._device is not None:
            return self._tensors[key].reshape(-1)[start:stop]
        kind, shape = self._kinds[key]
        count = min(stop, shape.numel()) - start
        return torch.from_numpy(np.fromfile(self._path(key), dtype=kind, count=count, offset=start * kind.itemsize))

    def remove(self, key: str) -> None:
        """Give back the space of a tensor that is no longer needed."""
        if self._device is not None:
            del self._tensors[key]
            return
        self._path(key).unlink()
        del self._kinds[key]

    def close(self) -> None:
        """Remove everything."""
        self._folder.cleanup()
        self._kinds, self._tensors = {}, {}

    def _path(self, key: str) -> Path:
        return Path(self._folder.name) / key
