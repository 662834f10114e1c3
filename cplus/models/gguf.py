"""A GGUF file as a plain float32 model folder, converted once and cached."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cplus import files, locks
from cplus.environment import free_memory
from cplus.files import cache_folder
from cplus.models import space
from cplus.models.packages import PACKAGED
from cplus.models.unpacking import architecture, is_known, memory_needed, write_weights
from cplus.terminal import console

_FORMAT = 2  # increase when the conversion changes, so that older folders are not reused
_TIED = {model.sha256 for model in PACKAGED.values() if model.ties_head}


def place(sha256: str) -> Path:
    """Where the converted folder of the GGUF file with this hash is, or will be."""
    return cache_folder() / "models" / f"gguf{_FORMAT}-{sha256[:32]}"


def converted(sha256: str, source: Callable[[Path], Path]) -> Path:
    """The float32 folder of the GGUF file with this hash.

    If it is not converted yet, `source` returns the file; it may create it in the temporary folder that it is given.
    """
    folder = place(sha256)
    if folder.exists():
        return folder
    with locks.holding(locks.beside(folder), wait=math.inf, notify=_print):
        if not folder.exists():  # another process may have converted it in the meantime
            files.tidy(folder.parent, folder.name)
            with files.scratch_folder(folder) as scratch, files.replacing_folder(folder) as part:
                path = source(scratch)
                _print(f"converting {path.name} to float32 in {folder}; this happens once")
                with space.named(folder.parent, f"converting {path.name}"):
                    convert(path, part, tie_head=sha256 in _TIED)
    return folder


def _print(sentence: str) -> None:
    console.print(sentence, markup=False, soft_wrap=True)


def convert(path: Path, out: Path, *, tie_head: bool = False) -> None:
    """Write a GGUF file's weights, dequantised, and its tokenizer as an ordinary model folder."""
    reader = _opened(path)
    need, free = memory_needed(reader), free_memory()
    if need > free:
        raise ValueError(
            f"converting {path.name} needs about {need / 1e9:.1f} GB of memory, but {free / 1e9:.1f} GB are free; end "
            f"other programs, or convert it on a larger machine and copy {cache_folder() / 'models'} from there"
        )
    if is_known(reader):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        if (head := _field(reader, f"{architecture(reader)}.attention.key_length")) is not None:
            config.head_dim = head  # transformers takes 128 for every Qwen3
        write_weights(reader, config, out, tie_head=tie_head)
    else:
        # Dequantised explicitly: a model with quantised blocks can be neither trained nor saved.
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, trust_remote_code=False, **_dequantised()
        )
        model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    if _field(reader, "tokenizer.ggml.pre") == "smollm":
        # transformers has no rule for this kind; without the step for digits "\n\n1" is tokenised incorrectly.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if _field(reader, "tokenizer.ggml.add_bos_token") and not _adds_bos(tokenizer):
        tokenizer.add_bos_token = True  # transformers leaves it out for Gemma: 4.8 instead of 2.6 nats per token
    tokenizer.save_pretrained(out)


def _dequantised() -> dict[str, Any]:
    """The option that dequantises; older versions of transformers lack it because they always do."""
    if not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def _adds_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is None or tokenizer.encode("a")[0] == tokenizer.bos_token_id


class _Bounded(GGUFReader):  # type: ignore[misc]
    """A reader that stops at the file's end: gguf's own goes on for as many elements as an array says it has."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if orig_offs >= len(self.data):
            raise ValueError("a field is longer than the file")
        return super()._get_field_parts(orig_offs, raw_type)


def _opened(path: Path) -> GGUFReader:
    """The file's fields and tensors; an incomplete file is refused."""
    try:
        return _Bounded(path)
    except (ValueError, LookupError, OverflowError, RecursionError) as error:
        size = path.stat().st_size
        raise ValueError(
            f"{path}: expected a complete GGUF file, but its {size:,} bytes cannot be read as one ({error}); "
            f"it may be truncated: download it again"
        ) from error


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()
