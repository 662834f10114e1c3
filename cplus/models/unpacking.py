"""A GGUF file's weights, dequantised and written tensor by tensor: memory is bounded by the largest tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFReader, dequantize, get_tensor_name_map
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from cplus import files

_SHARD_BYTES = 2**29
_CHUNK = 2**23  # weights dequantised at once
_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"

Weights = NDArray[np.float32]


def _unchanged(weights: Weights, name: str, config: Any) -> Weights:
    return weights


def _halves_apart(weights: Weights, name: str, config: Any) -> Weights:
    """Undo llama.cpp's interleaving of the two halves of each rotary head."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weights
    return weights.reshape(heads, -1, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _norms_around_zero(weights: Weights, name: str, config: Any) -> Weights:
    """Gemma multiplies by one plus the norm's weight, llama.cpp by the sum."""
    return weights - np.float32(1) if name.endswith("norm.weight") else weights


_LAYOUTS: dict[str, Callable[[Weights, str, Any], Weights]] = {
    "llama": _halves_apart,
    "qwen2": _unchanged,
    "qwen3": _unchanged,
    "gemma3": _norms_around_zero,
}
"""How llama.cpp's layout of a tensor becomes transformers', by architecture."""


def architecture(reader: GGUFReader) -> str:
    """The file's architecture, as llama.cpp names it."""
    field = reader.get_field("general.architecture")
    return "" if field is None else str(field.contents())


def is_known(reader: GGUFReader) -> bool:
    """Whether the file's architecture can be written tensor by tensor."""
    return architecture(reader) in _LAYOUTS


def memory_needed(reader: GGUFReader) -> int:
    """An upper estimate of the bytes that converting holds at once, beyond the running program's."""
    sizes = [4 * int(tensor.n_elements) for tensor in reader.tensors]
    # The largest tensor, its layout's copy and the copy that is written; or the shard before it.
    return 3 * max(sizes, default=0) + _SHARD_BYTES + (0 if is_known(reader) else sum(sizes))


def write_weights(reader: GGUFReader, config: Any, out: Path, *, tie_head: bool) -> None:
    """Write weights and configuration of a known architecture to `out`.

    `tie_head`: the file stores one matrix twice, as embedding and as head; only the head, which is quantised less
    coarsely, is kept for both.
    """
    if tie_head:
        config.tie_word_embeddings = True
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    named = sources(model, architecture(reader))
    if config.tie_word_embeddings:
        del named["lm_head.weight"]
    absent = sorted(source for source in named.values() if source not in tensors)
    if absent:
        raise ValueError(
            f"the GGUF file lacks {len(absent)} of the weights of {type(model).__name__}, e.g. {absent[0]}; "
            f"it may be another model's or truncated: download it again"
        )
    writer = _Shards(out)
    layout = _LAYOUTS[architecture(reader)]
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name, source in named.items():
        source = _HEAD if tie_head and source == _EMBEDDING else source
        weights = layout(_dequantised(tensors[source]), source, config)
        if weights.shape != shapes[name]:
            raise ValueError(f"{source}: expected the shape {shapes[name]}, got {weights.shape}; download it again")
        writer.add(name, torch.from_numpy(np.ascontiguousarray(weights)))
    writer.close()
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    config.save_pretrained(out)
    GenerationConfig.from_model_config(config).save_pretrained(out)


def sources(model: Any, arch: str) -> dict[str, str]:
    """The file's name of each weight of the model."""
    kind: MODEL_ARCH = next(key for key, value in MODEL_ARCH_NAMES.items() if value == arch)
    table = get_tensor_name_map(kind, model.config.num_hidden_layers)
    found = {}
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        found[name] = f"{table.get_name(stem)}.{suffix}"
    return found


def _dequantised(tensor: Any) -> Weights:
    """A tensor's weights in float32, unpacked a few rows at a time."""
    shape = tuple(int(length) for length in reversed(tensor.shape))
    rows = tensor.data.reshape(shape[0], -1) if len(shape) > 1 else tensor.data.reshape(1, -1)
    whole: Weights = np.empty((rows.shape[0], int(tensor.n_elements) // rows.shape[0]), dtype=np.float32)
    step = max(1, _CHUNK // whole.shape[1])
    for start in range(0, len(rows), step):
        whole[start : start + step] = dequantize(rows[start : start + step], tensor.tensor_type)
    return whole.reshape(shape)


class _Shards:
    """Files of at most half a gigabyte, or one tensor, and the index of what is where."""

    def __init__(self, out: Path) -> None:
        self._out, self._held, self._bytes = out, dict[str, torch.Tensor](), 0
        self._written: list[tuple[Path, list[str]]] = []
        self._total = 0

    def add(self, name: str, value: torch.Tensor) -> None:
        """Hold a tensor, writing the ones before it if there is no room for both."""
        if self._held and self._bytes + value.nbytes > _SHARD_BYTES:
            self._write()
        self._held[name] = value
        self._bytes += value.nbytes
        self._total += value.nbytes

    def close(self) -> None:
        """Write what is left and the index."""
        self._write()
        count = len(self._written)
        index: Mapping[str, str] = {}
        for number, (path, names) in enumerate(self._written, start=1):
            final = path.with_name(f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors")
            path.rename(final)
            index = {**index, **dict.fromkeys(names, final.name)}
        if count > 1:
            whole = {"metadata": {"total_size": self._total}, "weight_map": index}
            files.write_json(self._out / "model.safetensors.index.json", whole)

    def _write(self) -> None:
        path = self._out / f"shard{len(self._written)}"
        save_file(self._held, path, metadata={"format": "pt"})
        self._written.append((path, list(self._held)))
        self._held, self._bytes = {}, 0
