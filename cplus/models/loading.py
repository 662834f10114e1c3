"""Loads a model by name (hub id, folder, GGUF file or built-in alias), with float32 master weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from cplus import files, toy
from cplus.models import fetching, four_bit, names
from cplus.models.gguf import converted
from cplus.models.identity import fingerprint
from cplus.models.packages import PACKAGED
from cplus.models.presets import PRESETS
from cplus.support import keep_gradients

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model with its tokenizer, and the hash of its weights at load time."""

    name: str
    model: Any
    tokenizer: Any
    fingerprint: str
    device: torch.device
    window: int


def load(
    name: str | Path,
    *,
    dtype: str = "float32",
    device: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Loaded:
    """Load a model by hub id, folder, GGUF file, built-in alias or preset name.

    The dtype `4bit` packs the weights of linear layers; everything else, and what they compute, is float32.
    """
    where = resolve(str(name))
    local = isinstance(where, Path)
    if local and revision is not None:
        raise ValueError(f"revision applies to hub ids, but {str(name)!r} is local; leave revision out")
    options = {"trust_remote_code": trust_remote_code, "revision": revision, "local_files_only": local}
    target = choose_device(device)
    packed = dtype == four_bit.NAME
    precision = four_bit.loading(target) if packed else {"dtype": as_dtype(dtype)}
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        with without_bars() if local else nullcontext():
            model, report = AutoModelForCausalLM.from_pretrained(
                where, output_loading_info=True, use_safetensors=True, **precision, **options
            )
    except (OSError, ValueError, SafetensorError) as error:
        hint = "expected a complete model folder" if local else f"built-in names are {', '.join(names.ALIASES)}"
        raise ValueError(f"could not load {str(name)!r}: {' '.join(str(error).split())}; {hint}") from error
    # transformers would fill a weight the files lack with random numbers, and only warn.
    lacking = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if lacking:
        raise ValueError(
            f"{str(name)!r} lacks {len(lacking)} of its weights or has them in another shape, e.g. {lacking[0]}; "
            f"expected a complete checkpoint of {type(model).__name__}"
        )
    keep_gradients(model) if packed else model.to(target)
    model.eval()
    return replace(of(model, tokenizer), name=str(name), device=target)


def of(model: Any, tokenizer: Any) -> Loaded:
    """A model that is already loaded, as a `Loaded` value."""
    named = getattr(model.config, "_name_or_path", "") or type(model).__name__
    device = next(model.parameters()).device
    return Loaded(
        name=str(named),
        model=model,
        tokenizer=tokenizer,
        fingerprint=fingerprint(model),
        device=device,
        window=window(model),
    )


def resolve(name: str) -> Path | str:
    """Where a name leads: a folder on this machine, or a hub id."""
    names.check(name)
    path = Path(name).expanduser()
    if name in toy.NAMES:
        return toy.folder(name)
    if name in PACKAGED:
        return fetching.folder(name)
    if name in PRESETS:
        return PRESETS[name].model
    if path.suffix == ".gguf":
        return converted(files.sha256_file(path), lambda scratch: path)
    return path if path.is_dir() else name


def choose_device(device: str) -> torch.device:
    """The device of this name; `auto` is the first available of cuda, mps and cpu."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return torch.device(next(kind for kind, found in available.items() if found))
    if not available.get(device.partition(":")[0]):
        kinds = ", ".join(kind for kind, found in available.items() if found)
        raise ValueError(f"device must be auto or an available one ({kinds}), got {device!r}")
    return torch.device(device)


def as_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name.

    >>> as_dtype("bf16")
    torch.bfloat16
    """
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def computing(dtype: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a float32 model computes in this dtype: autocast for bfloat16, nothing for float32.

    Paper: App. "Additional Analyses" trains in BF16; protocol section 2 keeps float32 masters.
    """
    compute = as_dtype(dtype)
    if compute is torch.float16:
        raise ValueError("compute dtype must be float32 or bfloat16: float16 needs loss scaling; use bfloat16")
    return nullcontext() if compute is torch.float32 else torch.autocast(device.type, dtype=compute)


def window(model: nn.Module) -> int:
    """The model's context window, in tokens."""
    config: Any = model.config
    return int(config.get_text_config().max_position_embeddings)


def save(model: nn.Module, tokenizer: Any, out: Path) -> None:
    """Atomically write a folder that plain transformers can load: safetensors and tokenizer."""
    if out.exists() and not (out / "config.json").is_file() and (out.is_file() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not a model folder, so it is not replaced; choose another folder")
    plain: Any = model
    with files.replacing_folder(out) as part, without_bars():
        plain.save_pretrained(part)
        tokenizer.save_pretrained(part)


@contextmanager
def without_bars() -> Iterator[None]:
    """Turn off transformers' progress bars for reading and writing weights."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
