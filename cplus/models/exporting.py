"""A model folder as one GGUF file for llama.cpp and what is built on it: weights, tokenizer and chat template.

Known are a few architectures with a byte-level BPE tokenizer; others are refused, because a file that loads and gives
wrong answers is worse than none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFWriter, LlamaFileType, TokenType, get_tensor_name_map

from cplus.base import files
from cplus.models.loading import load

Dtype: TypeAlias = Literal["float16", "float32"]
CONVERTER = "llama.cpp's convert_hf_to_gguf.py converts more kinds of models"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_QWEN: "qwen2", _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1): "llama-bpe"}
"""llama.cpp's name of each known pattern by which a tokenizer splits text before BPE."""


def write_gguf(folder: Path, out: Path, dtype: Dtype = "float16") -> dict[str, Any]:
    """Write the model of a folder to one GGUF file and return what was written.

    Norms and biases stay float32, as llama.cpp expects.
    """
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: expected a model folder with a config.json; a job writes it to OUT/model")
    loaded = load(folder.absolute(), device="cpu")
    config, weights = loaded.model.config, loaded.model.state_dict()
    rope = getattr(config, "rope_parameters", None) or {}
    reason = None
    if config.model_type not in ARCHITECTURES:
        reason = f"expected a model of {', '.join(ARCHITECTURES)}, got {config.model_type}"
    elif rope.get("rope_type", "default") != "default":
        reason = f"positions scaled by {rope['rope_type']!r} cannot be exported"
    elif getattr(config, "use_sliding_window", False):
        reason = "a model with a sliding window cannot be exported"
    if reason is not None:
        raise ValueError(f"{folder}: {reason}; {CONVERTER}")
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    half = dtype == "float16"
    rotary = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with files.replacing(out) as part:
        writer = GGUFWriter(part, config.model_type)
        writer.add_file_type(LlamaFileType.MOSTLY_F16 if half else LlamaFileType.ALL_F32)
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_name(folder.name)
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
        writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
        writer.add_vocab_size(config.vocab_size)
        splits = _add_tokenizer(writer, folder, loaded.tokenizer, config.vocab_size)
        for name, tensor in weights.items():
            stem, _, suffix = name.rpartition(".")
            value, heads = tensor.numpy(), rotary.get(stem.rpartition(".")[2])
            if config.model_type == "llama" and heads is not None:  # llama.cpp interleaves each rotary head's halves
                value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
            value = np.ascontiguousarray(value, dtype=np.float16 if half and value.ndim > 1 else np.float32)
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    written = {"path": str(out), "bytes": out.stat().st_size, "tensors": len(weights), "dtype": dtype}
    return {**written, "architecture": config.model_type, "splits_text_as": splits}


def _add_tokenizer(writer: GGUFWriter, folder: Path, tokenizer: Any, vocabulary: int) -> str:
    """Add a byte-level BPE tokenizer with its special tokens and chat template; any other kind is refused."""
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    model, first = whole["model"], whole.get("pre_tokenizer") or {}
    parts = first.get("pretokenizers", [first])
    kinds = [part.get("type") for part in parts]
    if model["type"] != "BPE" or "ByteLevel" not in kinds:
        raise ValueError(f"{folder}: expected a byte-level BPE tokenizer to export, got {model['type']}; {CONVERTER}")
    splits = None
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        splits = "smollm"
    elif kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        splits = "gpt-2"
    elif kinds == ["Split", "ByteLevel"]:
        splits = _SPLITS.get(parts[0]["pattern"].get("Regex"))
    if splits is None:
        raise ValueError(f"{folder}: its tokenizer splits text by {' and '.join(kinds)}, unknown here; {CONVERTER}")
    tokens = [f"[PAD{i}]" for i in range(vocabulary)]
    types = [TokenType.UNUSED] * vocabulary
    for text, number in model["vocab"].items():
        tokens[number], types[number] = text, TokenType.NORMAL
    for added in whole["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    for kind in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{kind}_token_id")) is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    writer.add_add_bos_token(tokenizer.encode("a")[:1] == [tokenizer.bos_token_id])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    return splits
