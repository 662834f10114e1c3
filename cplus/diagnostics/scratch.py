"""Tensors stored on disk, so that an observer holds one of them in memory at a time, however large the model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class Shelf:
    """Scratch files in the system's temporary folder (TMPDIR), removed when the shelf is closed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cplus-shelf-")
        self._kinds: dict[str, tuple[np.dtype[np.generic], torch.Size]] = {}

    def put(self, key: str, tensor: Tensor) -> None:
        """Write a tensor, replacing any with the same key."""
        values = tensor.detach().cpu().contiguous().numpy()
        values.tofile(self._path(key))
        self._kinds[key] = (values.dtype, tensor.shape)

    def get(self, key: str, device: torch.device) -> Tensor:
        """Read a tensor back."""
        kind, shape = self._kinds[key]
        return torch.from_numpy(np.fromfile(self._path(key), dtype=kind)).view(shape).to(device)

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Some coordinates of the flat tensor."""
        kind, shape = self._kinds[key]
        count = min(stop, shape.numel()) - start
        return torch.from_numpy(np.fromfile(self._path(key), dtype=kind, count=count, offset=start * kind.itemsize))

    def write(self, key: str, start: int, values: Tensor) -> None:
        """Replace some coordinates of the flat tensor."""
        kind, _ = self._kinds[key]
        with self._path(key).open("rb+") as file:
            file.seek(start * kind.itemsize)
            values.detach().cpu().contiguous().numpy().astype(kind).tofile(file)

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()
        self._kinds = {}

    def _path(self, key: str) -> Path:
        return Path(self._folder.name) / key
