"""A model folder as one GGUF file for llama.cpp and what is built on it: weights, tokenizer and chat template.

Known are a few architectures with a byte-level BPE tokenizer; others are refused, because a file that loads and gives
wrong answers is worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from gguf import GGUFWriter, LlamaFileType, TokenType

from cplus.base import files
from cplus.models.gguf import Weights, sources
from cplus.models.loading import load

Dtype: TypeAlias = Literal["float16", "float32"]
_TYPES: Mapping[Dtype, tuple[Any, LlamaFileType]] = {
    "float16": (np.float16, LlamaFileType.MOSTLY_F16),
    "float32": (np.float32, LlamaFileType.ALL_F32),
}
CONVERTER = "llama.cpp's convert_hf_to_gguf.py converts more kinds of models"


def _unchanged(weights: Weights, name: str, config: Any) -> Weights:
    return weights


def _halves_together(weights: Weights, name: str, config: Any) -> Weights:
    """Interleave the two halves of each rotary head, as llama.cpp stores them."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weights
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


_LAYOUTS: Mapping[str, Callable[[Weights, str, Any], Weights]] = {
    "llama": _halves_together,
    "qwen2": _unchanged,
    "qwen3": _unchanged,
}
"""How transformers' layout of a tensor becomes llama.cpp's, by architecture."""
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    path: Path
    architecture: str
    dtype: Dtype
    tensors: int
    bytes: int
    splits_text_as: str
    """llama.cpp's name for how the tokenizer splits text before BPE."""


def write_gguf(folder: Path, out: Path, dtype: Dtype = "float16") -> Exported:
    """Write the model of a folder to one GGUF file; norms and biases stay float32, as llama.cpp expects."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: expected a model folder with a config.json; a job writes it to OUT/model")
    loaded = load(folder.absolute(), device="cpu")
    config, tokenizer = loaded.model.config, loaded.tokenizer
    _check(folder, config)
    spoken = _Tokenizer.read(folder, tokenizer, config.vocab_size)
    kind, names = config.model_type, sources(loaded.model, config.model_type)
    if config.tie_word_embeddings:
        del names["lm_head.weight"]
    weights, (narrow, file_type) = loaded.model.state_dict(), _TYPES[dtype]
    with files.replacing(out) as part:
        writer = GGUFWriter(part, kind)
        writer.add_file_type(file_type)
        _describe(writer, folder.name, config)
        spoken.add(writer, tokenizer)
        for name, stored in names.items():
            value = _LAYOUTS[kind](weights[name].numpy(), stored, config)
            writer.add_tensor(stored, np.ascontiguousarray(value, dtype=narrow if value.ndim > 1 else np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return Exported(
        path=out,
        architecture=kind,
        dtype=dtype,
        tensors=len(names),
        bytes=out.stat().st_size,
        splits_text_as=spoken.pre,
    )


def _check(folder: Path, config: Any) -> None:
    """Refuse an unknown architecture, and positions that are not plain rotary ones."""
    if config.model_type not in _LAYOUTS:
        raise ValueError(
            f"{folder}: expected a model of {', '.join(_LAYOUTS)} to export, got {config.model_type}; {CONVERTER}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{folder}: positions scaled by {rope['rope_type']!r} cannot be exported; {CONVERTER}")
    if getattr(config, "use_sliding_window", False):
        raise ValueError(f"{folder}: a model with a sliding window cannot be exported; {CONVERTER}")


def _describe(writer: GGUFWriter, name: str, config: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
    writer.add_vocab_size(config.vocab_size)


@dataclass(frozen=True, kw_only=True)
class _Tokenizer:
    """A byte-level BPE tokenizer in llama.cpp's terms."""

    tokens: list[str]
    types: list[TokenType]
    merges: list[str]
    pre: str

    @staticmethod
    def read(folder: Path, tokenizer: Any, vocabulary: int) -> _Tokenizer:
        """From the tokenizer's JSON form; any other kind is refused."""
        whole = json.loads(tokenizer.backend_tokenizer.to_str())
        model, parts = whole["model"], _parts(whole.get("pre_tokenizer"))
        if model["type"] != "BPE" or not any(part["type"] == "ByteLevel" for part in parts):
            raise ValueError(
                f"{folder}: expected a byte-level BPE tokenizer to export, got {model['type']}; {CONVERTER}"
            )
        tokens = [f"[PAD{i}]" for i in range(vocabulary)]
        types = [TokenType.UNUSED] * vocabulary
        for text, number in model["vocab"].items():
            tokens[number], types[number] = text, TokenType.NORMAL
        for added in whole["added_tokens"]:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        return _Tokenizer(tokens=tokens, types=types, merges=merges, pre=_splitting(folder, parts))

    def add(self, writer: GGUFWriter, tokenizer: Any) -> None:
        """Write tokens, merges, special tokens and the chat template."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        special = {
            writer.add_bos_token_id: tokenizer.bos_token_id,
            writer.add_eos_token_id: tokenizer.eos_token_id,
            writer.add_unk_token_id: tokenizer.unk_token_id,
            writer.add_pad_token_id: tokenizer.pad_token_id,
        }
        for add, number in special.items():
            if number is not None:
                add(number)
        writer.add_add_bos_token(tokenizer.encode("a")[:1] == [tokenizer.bos_token_id])
        if tokenizer.chat_template:
            writer.add_chat_template(tokenizer.chat_template)


def _parts(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    return pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]


def _splitting(folder: Path, parts: list[dict[str, Any]]) -> str:
    """llama.cpp's name of a known way to split text; an unknown one is refused."""
    kinds = [part["type"] for part in parts]
    pattern = next((part["pattern"].get("Regex") for part in parts if part["type"] == "Split"), None)
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return "smollm"
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"] and pattern in (_QWEN, _LLAMA3):
        return "qwen2" if pattern == _QWEN else "llama-bpe"
    raise ValueError(
        f"{folder}: its tokenizer splits text by {' and '.join(kinds)}, which has no name here; {CONVERTER}"
    )
