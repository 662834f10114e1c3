"""The gate's C++ kernels: built once with the local compiler, cached on disk and called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cplus import files

SOURCE = Path(__file__).with_name("gate.cpp")
FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fopenmp-simd", "-ffp-contract=off"),
    *("-fno-math-errno", "-fno-trapping-math"),  # otherwise square roots and comparisons are not vectorised
)
VECTORS = {  # by the CPU capability that torch reports: bits per vector and the flags that enable them
    "AVX2": (256, ("-mavx2", "-mfma")),
    "AVX512": (512, ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")),
}
COMPILERS = ("g++", "clang++", "c++")
PARAMETER = {"gate": 1, "adamw": 0}  # which of a kernel's tensors is the parameter it writes
SHARED = 1 << 15  # smaller tensors are not worth waking other threads for


def vector() -> tuple[int, tuple[str, ...]]:
    """The vector width in bits and the compiler flags for it; without a flag every compiler uses 128."""
    return VECTORS.get(torch.backends.cpu.get_cpu_capability(), (128, ()))


def processor() -> str:
    """The processor's name, as far as the system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def command() -> list[str]:
    """The compiler (CXX if set) and its flags."""
    named = shlex.split(os.environ.get("CXX", "")) or [found for name in COMPILERS if (found := shutil.which(name))][:1]
    if not named:
        raise RuntimeError(f"no C++ compiler: CXX is not set and none of {', '.join(COMPILERS)} was found")
    return [*named, *FLAGS, *vector()[1]]


@cache
def library() -> ctypes.CDLL:
    """The kernels, loaded from the cache or built now; safe to call from several processes at once."""
    line = command()
    name = files.fingerprint([*line, SOURCE.read_text(encoding="utf-8")])[:32]
    path = files.cache_folder() / "kernels" / f"gate-{name}.so"
    if not _whole(path):
        _build(line, path)
    return ctypes.CDLL(str(path))


def _build(line: Sequence[str], path: Path) -> None:
    """Compile to a temporary file, append its SHA-256, which the loader ignores, and move it to `path`."""
    with files.replacing(path) as part:
        done = subprocess.run([*line, "-o", str(part), str(SOURCE)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{line[0]} failed: {(done.stderr.strip() or f'exit code {done.returncode}')}")
        code = part.read_bytes()
        part.write_bytes(code + hashlib.sha256(code).digest())


def _whole(path: Path) -> bool:
    """Whether the file exists and is intact: loading a damaged one could crash the process."""
    content = path.read_bytes() if path.is_file() else b""
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]


def huge(memory: Tensor) -> Tensor:
    """The same memory on huge pages where the system has them; must be called before the first write."""
    page, advice = mmap.PAGESIZE, getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        begin = -(-memory.data_ptr() // page) * page
        size = max(0, memory.data_ptr() + memory.nbytes - begin)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
    return memory


def run(kernel: str, tensors: Sequence[Tensor], packed: Tensor, ema: Tensor | None, numbers: tuple[float, ...]) -> None:
    """One in-place pass over tensors of equal size, on as many threads as torch uses."""
    count = tensors[0].numel()
    for tensor in tensors:
        _check(tensor, count, torch.float32)
    _check(packed, (count + 3) // 4, torch.uint8)
    if ema is not None:
        _check(ema, count, ema.dtype)
    function = _function(kernel, len(tensors), None if ema is None else ema.dtype)
    addresses = [tensor.data_ptr() for tensor in tensors]
    average = None if ema is None else ema.data_ptr()
    threads = torch.get_num_threads() if count >= SHARED else 1
    function(count, *addresses, packed.data_ptr(), average, _floats(numbers), threads)
    # Autograd did not see this write and would otherwise allow a backward pass through a graph with the old value.
    torch.autograd.graph.increment_version(tensors[PARAMETER[kernel]])


@cache
def _function(kernel: str, tensors: int, ema: torch.dtype | None) -> Any:
    """One of the library's functions, with its argument types declared."""
    found = library()[f"{kernel}_{'none' if ema is None else str(ema).removeprefix('torch.')}"]
    found.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * (tensors + 3), ctypes.c_int]
    found.restype = None
    return found


@lru_cache(maxsize=8)
def _floats(numbers: tuple[float, ...]) -> Any:
    return (ctypes.c_float * len(numbers))(*numbers)


def _check(tensor: Tensor, count: int, dtype: torch.dtype) -> None:
    """Refuse tensors that a kernel would misread: it receives an address and nothing else."""
    if tensor.numel() != count or tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"the compiled gate takes {count} contiguous elements of {dtype} on the CPU, got {tensor.numel()} of "
            f"{tensor.dtype} with strides {tensor.stride()} on {tensor.device}"
        )
