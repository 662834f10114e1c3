"""Small GGUF files of tiny models, laid out as llama.cpp does, and small wheels that carry them in parts."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cplus.base import files
from cplus.models.names import PackagedModel

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


def write_gguf(tiny: Any, path: Path, pre: str = "smollm", *, add_bos: bool = False, quantise: str = "") -> Path:
    """The tiny model as a float32 GGUF file; the tensor `quantise` is packed as Q8_0."""
    config, tokenizer = tiny.model.config, tiny.tokenizer
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    if arch in ("gemma3", "qwen3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    _add_tokenizer(writer, tokenizer, pre, add_bos)
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch), config.num_hidden_layers
    )
    for name, value in tiny.model.state_dict().items():
        stem, _, part = name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = _laid_out(arch, config, stem, value.numpy().astype(np.float32))
        own = f"{names.get_name(stem)}.{part}"
        if own == quantise:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(own, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(own, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, pre: str, add_bos: bool) -> None:
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.added_tokens_encoder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([3 if word in special else 1 for word in words])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(tokenizer.chat_template)


def _laid_out(arch: str, config: Any, stem: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = stem.rpartition(".")[2]
    if arch == "llama" and projection in heads:  # the two halves of each rotary head interleaved
        return array.reshape(heads[projection], 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape).copy()
    if arch == "gemma3" and stem.endswith("norm"):  # one plus the norm's weight
        return array + np.float32(1)
    return array


def write_wheels(content: bytes, folder: Path, count: int, *, sha256: str | None = None) -> PackagedModel:
    """A file cut into parts, one wheel each, and the table's entry for it."""
    size = -(-len(content) // count)
    names = [f"tiny_part{number}-1.0-py3-none-any.whl" for number in range(1, count + 1)]
    for index, name in enumerate(names):
        part = content[index * size : (index + 1) * size]
        write_wheel(folder / name, f"tiny-part{index + 1}", {f"tiny_part{index + 1}/part{index:02}": part})
    whole = folder / "whole"
    whole.write_bytes(content)
    found = sha256 or files.sha256_file(whole)
    whole.unlink()
    return PackagedModel(
        hub_id="owner/tiny",
        licence="apache-2.0",
        notice="Tiny is licensed under Apache-2.0.",
        package="tiny-part{number}==1.0",
        member="tiny_part{number}/part{index:02}",
        parts=count,
        size=len(content),
        sha256=found,
        parameters=1000,
    )


def write_wheel(path: Path, name: str, members: dict[str, bytes], extra: Sequence[str] = ("../../escaped",)) -> None:
    """A wheel that pip accepts, with these files and some that try to be written elsewhere."""
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        for escaping in extra:
            archive.writestr(escaping, b"no")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
