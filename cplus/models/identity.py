"""The identity of a model, independent of its name: a hash of its weights and configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from cplus import files

# Fields that saving, loading or a library version may change without changing what the model computes.
_VOLATILE = frozenset(
    {"_model_name_or_path", "_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
)


def fingerprint(model: nn.Module) -> str:
    """The SHA-256 of a model's configuration, parameters and persistent buffers; the same after saving and loading."""
    with ThreadPoolExecutor() as pool:  # hashlib releases the interpreter lock on large blocks
        digests = dict(pool.map(_digest, *zip(*_tensors(model), strict=True)))
    return files.fingerprint({"config": _configuration(model), "tensors": digests})


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(model.named_parameters())  # a tied weight appears once, under its first name
    yield from parameters.items()
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield from ((name, value) for name, value in model.state_dict().items() if name not in shared)


def _digest(name: str, tensor: Tensor) -> tuple[str, str]:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    content = hashlib.sha256(f"{plain.dtype} {list(tensor.shape)}".encode())
    content.update(plain.view(torch.uint8).numpy().data)
    return name, content.hexdigest()


def _configuration(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    if config is None:
        return {}
    return {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}
