"""The gate's kernels: compiled where a compiler is at hand, else plain torch, to one unit of last place the same."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from cplus.base import files
from cplus.core import algorithm

# The gate's C++ kernels: built once with the local compiler, cached on disk and called through ctypes.


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
PARALLEL_FROM = 1 << 15  # smaller tensors are not worth waking other threads for


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
    threads = torch.get_num_threads() if count >= PARALLEL_FROM else 1
    function(count, *addresses, packed.data_ptr(), average, (ctypes.c_float * len(numbers))(*numbers), threads)
    # Autograd did not see this write and would otherwise allow a backward pass through a graph with the old value.
    torch.autograd.graph.increment_version(tensors[PARAMETER[kernel]])


@cache
def _function(kernel: str, tensors: int, ema: torch.dtype | None) -> Any:
    """One of the library's functions, with its argument types declared."""
    found = library()[f"{kernel}_{'none' if ema is None else str(ema).removeprefix('torch.')}"]
    found.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * (tensors + 3), ctypes.c_int]
    found.restype = None
    return found


def _check(tensor: Tensor, count: int, dtype: torch.dtype) -> None:
    """Refuse tensors that a kernel would misread: it receives an address and nothing else."""
    if tensor.numel() != count or tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"the compiled gate takes {count} contiguous elements of {dtype} on the CPU, got {tensor.numel()} of "
            f"{tensor.dtype} with strides {tensor.stride()} on {tensor.device}"
        )


# The gate in one pass over memory: packed signs, a compact moving average, and compiled kernels that work in place.
#
# The results are those of `cplus.core.algorithm` to one unit of last place: packing keeps the sign, which is all the
# mask uses. Optionally, the moving average has 16 or 8 bits; a rounding error of at most h per step changes it by at
# most h / (1 - beta) in total. The kernels are C++ on the CPU; on other devices Inductor compiles the functions below.


EmaType: TypeAlias = Literal["float32", "bfloat16", "uint8"]
WORTH_COMPILING = 1_000_000  # parameters; smaller models use the plain gate
CHUNK = 1 << 20  # bytes of signs packed at a time
ALONE = 1 << 20  # coordinates from which a tensor is not joined with others
TOGETHER = 1 << 22  # coordinates that are joined at most
FIRST = 1 << 10  # coordinates of the example tensors that Inductor compiles a kernel with
LEAST = 4  # coordinates of a tensor that the compiled kernels accept
ROUNDED = ("emulate_precision_casts", "eager_numerics.division_rounding")
"""Options of Inductor, which on a GPU otherwise skips the rounding of a bfloat16 average and divides approximately."""
LEVELS = 255.0  # a uint8 average is stored in steps of 1/255
STILL = (1.0, 0.0, 1.0)
"""The gate's scalars for an average that does not move: coefficients that are applied as they are stored."""
UNMOVED = (0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, *STILL)
"""The scalars of AdamW and gate with which parameters, moments and average stay as they are."""


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs of a tensor at two bits each: 0 for zero, 1 for plus, 2 for minus; byte j holds elements 4j to 4j+3."""

    packed: Tensor
    shape: torch.Size

    @classmethod
    def of(cls, gradient: Tensor) -> Signs:
        """Pack the signs of a gradient, in chunks to use little extra memory.

        >>> Signs.of(torch.tensor([3.0, -2.0, 0.0, 1e-30, -1.0])).unpacked()
        tensor([ 1, -1,  0,  1, -1], dtype=torch.int8)
        """
        flat = gradient.detach().reshape(-1)
        packed = torch.zeros(-(-flat.numel() // 4), dtype=torch.uint8, device=flat.device)
        for start in range(0, packed.numel(), CHUNK):
            chunk = packed[start : start + CHUNK]
            for k in range(4):
                part = flat[4 * start + k : 4 * (start + CHUNK) : 4]
                codes = (part > 0).to(torch.uint8) + (part < 0).to(torch.uint8) * 2
                chunk[: part.numel()] |= codes << 2 * k
        return cls(packed, gradient.shape)

    @property
    def nbytes(self) -> int:
        """A quarter of a byte per coordinate."""
        return self.packed.nbytes

    def unpacked(self) -> Tensor:
        """The signs as -1, 0 and 1 in int8."""
        return sign_of(self.packed, self.shape.numel()).view(self.shape)


def sign_of(packed: Tensor, count: int) -> Tensor:
    """The first `count` signs of packed bytes as -1, 0 and 1 in int8."""
    codes = packed[:, None] >> torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return ((codes & 1).to(torch.int8) - (codes >> 1 & 1).to(torch.int8)).view(-1)[:count]


class Layout:
    """Which tensors are processed together, so that launches on an accelerator do not grow with their number.

    Small tensors of one kind are joined in one buffer, a unit. A large tensor is a unit of its own, because its kernel
    takes longer than its launch, and so is every tensor on the CPU, where there are no launches.
    """

    def __init__(self, tensors: Sequence[Tensor], kinds: Sequence[object] = ()) -> None:
        self.shapes = [t.shape for t in tensors]
        self.units: list[list[int]] = []
        filling: dict[object, list[int]] = {}
        for i, t in enumerate(tensors):
            kind = (kinds[i], t.dtype, t.device) if kinds else None
            small = kind is not None and not t.is_cpu and t.numel() < ALONE and t.numel() % 4 == 0
            if small and kind in filling and sum(tensors[j].numel() for j in [*filling[kind], i]) <= TOGETHER:
                filling[kind].append(i)
                continue
            self.units.append([i])
            if small:
                filling[kind] = self.units[-1]

    def join(self, unit: int, tensors: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
        """The tensors of a unit in one buffer; a tensor alone is itself."""
        own = [tensors[i] for i in self.units[unit]]
        return own[0] if len(own) == 1 else torch.cat([t.reshape(-1) for t in own])

    def joined(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All tensors, by unit."""
        return [self.join(unit, tensors) for unit in range(len(self.units))]

    def split(self, unit: int, whole: Any) -> list[Any]:
        """The parts of a unit's buffer, or of its signs, in the shapes of its tensors; None for each part of None."""
        shapes = [self.shapes[i] for i in self.units[unit]]
        if whole is None or len(shapes) == 1:
            return [whole] * len(shapes)
        if isinstance(whole, Signs):
            quarters = torch.split(whole.packed, [shape.numel() // 4 for shape in shapes])
            return [Signs(part, shape) for part, shape in zip(quarters, shapes, strict=True)]
        parts = torch.split(whole, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def separate(self, wholes: Sequence[Any]) -> list[Any]:
        """The parts of all units, in the order of the tensors."""
        places = [i for unit in self.units for i in unit]
        parts = [part for unit, whole in enumerate(wholes) for part in self.split(unit, whole)]
        return [part for _, part in sorted(zip(places, parts, strict=True), key=lambda pair: pair[0])]


def stored(ema: Tensor, like: Tensor) -> Tensor:
    """A moving average as it is stored: unchanged, or rounded to bfloat16 or to the nearest of 256 levels."""
    return (ema * LEVELS).round().to(torch.uint8) if like.dtype == torch.uint8 else ema.to(like.dtype)


def read(ema: Tensor) -> Tensor:
    """A stored moving average as numbers in [0, 1]."""
    return ema.float() / LEVELS if ema.dtype == torch.uint8 else ema.to(torch.promote_types(ema.dtype, torch.float32))


def zeros(theta: Tensor, kind: EmaType) -> Tensor:
    """The average before the first step."""
    if kind == "float32":
        return algorithm.zeros(theta)
    return torch.zeros_like(theta, dtype=torch.uint8 if kind == "uint8" else torch.bfloat16)


def gate_numbers(beta: float, t: int) -> tuple[float, ...]:
    """The gate's scalars at step t; differences are computed in double precision, where 1 - 0.999 is exact enough."""
    return beta, 1.0 - beta, 1.0 - beta**t


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors; on the CPU in one buffer of huge pages, since ordinary page faults cost more than the copy."""
    if not all(fits(tensor) and tensor.is_cpu for tensor in tensors):
        return [tensor.clone() for tensor in tensors]
    sizes = [-(-tensor.numel() // 16) * 16 for tensor in tensors]  # each starts on a cache line
    buffer = torch.empty(sum(sizes))
    if (advice := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:  # before the first write
        begin = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = max(0, buffer.data_ptr() + buffer.nbytes - begin)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
    parts = [part[: t.numel()].view(t.shape) for part, t in zip(torch.split(buffer, sizes), tensors, strict=True)]
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor)
    return parts


Numbers: TypeAlias = "tuple[float, ...] | Tensor"
"""A step's scalars: floats for the kernels on the CPU, a tensor on any other device."""


def on_device(
    rows: Sequence[tuple[float, ...]], device: torch.device, moving: Tensor | None = None
) -> Sequence[Numbers]:
    """Scalars where the kernels read them: one copy to the device for all rows; those of no change if not `moving`."""
    if device.type == "cpu":
        return rows
    if moving is None:
        return scalars(rows, device).unbind()
    held = scalars([*rows, UNMOVED[-len(rows[0]) :]], device)
    return torch.where(moving, held[:-1], held[-1]).unbind()


def scalars(values: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers as a tensor on the device, so that new values cause no recompilation."""
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)


def gate(theta: Tensor, param: Tensor, signs: Signs | None, ema: Tensor | None, numbers: Numbers) -> None:
    """In place: `param` holds the proposal and receives the gated step; without an average the mask is applied."""
    _pass(gate_block, (theta, param), signs, ema, numbers)


def adamw(
    param: Tensor, gradient: Tensor, m: Tensor, v: Tensor, signs: Signs | None, ema: Tensor | None, numbers: Numbers
) -> None:
    """In place: AdamW's proposal and its gate in one pass, without a copy of the parameters."""
    _pass(adamw_block, (param, gradient.contiguous(), m, v), signs, ema, numbers)


_NO_SIGNS: dict[torch.device, Tensor] = {}


def _no_signs(count: int, device: torch.device) -> Tensor:
    """Signs of zero, with which nothing conflicts: a buffer shared by all tensors, as long as the largest needs."""
    if device not in _NO_SIGNS or len(_NO_SIGNS[device]) < count:
        _NO_SIGNS[device] = torch.zeros(count, dtype=torch.uint8, device=device)
    return _NO_SIGNS[device][:count]


def _pass(
    block: Callable[..., None], tensors: Sequence[Tensor], signs: Signs | None, ema: Tensor | None, numbers: Numbers
) -> None:
    device = tensors[0].device
    packed = _no_signs(-(-tensors[0].numel() // 4), device) if signs is None else signs.packed
    if isinstance(numbers, tuple):
        run(block.__name__.removesuffix("_block"), tensors, packed, ema, numbers)
        return
    # Without detach the compiler guards on the base of the view and builds a second kernel for vectors.
    flat = [tensor.view(-1).detach() for tensor in tensors]
    kernel = compiled(block, None if ema is None else ema.dtype, device)
    kernel(*flat, packed, None if ema is None else ema.view(-1).detach(), numbers)


def _gated(theta: Tensor, proposed: Tensor, packed: Tensor, ema: Tensor | None, numbers: Sequence[Tensor]) -> Tensor:
    """Lines 10-13 of Algorithm 1 on flat tensors: return the new parameters, update the average in place."""
    beta, rest, correction = numbers
    conflict = sign_of(packed, theta.numel()) * (proposed - theta) > 0
    if ema is None:
        return torch.where(conflict, theta, proposed)
    kept = stored(beta * read(ema) + rest * (~conflict).to(torch.float32), ema)
    ema.copy_(kept)
    return torch.lerp(theta, proposed, (read(kept) / correction).clamp(0.0, 1.0))


def gate_block(theta: Tensor, param: Tensor, packed: Tensor, ema: Tensor | None, numbers: Tensor) -> None:
    """`gate` as Inductor compiles it."""
    param.copy_(_gated(theta, param, packed, ema, numbers.unbind()))


def adamw_block(
    param: Tensor, gradient: Tensor, m: Tensor, v: Tensor, packed: Tensor, ema: Tensor | None, numbers: Tensor
) -> None:
    """`adamw` as Inductor compiles it.

    Source: Loshchilov and Hutter 2019, in the order of torch's fused kernel, except that one division by a scalar is a
    product here. A coordinate whose gradient is not finite proposes no change and keeps its moments.
    """
    fine = gradient.abs() <= torch.finfo(gradient.dtype).max
    rest1, beta2, rest2, decay, step, root, eps, *gate = numbers.unbind()
    first = torch.lerp(m, gradient, rest1)
    second = beta2 * v + rest2 * gradient * gradient
    proposed = param * decay - step * first / (second.sqrt() * root + eps)
    applied = _gated(param, torch.where(fine, proposed, param), packed, ema, gate)
    param.copy_(applied)
    m.copy_(torch.where(fine, first, m))
    v.copy_(torch.where(fine, second, v))


@cache
def compiled(block: Callable[..., None], ema: torch.dtype | None, device: torch.device) -> Callable[..., None]:
    """The block as one in-place kernel for every size; compiled once and kept in Inductor's cache."""
    # A copy of the code object has its own compilation cache. It holds one kernel, so guards can be skipped: everything
    # that could differ is an argument of this function, and `fits` excludes the rest.
    own = FunctionType(block.__code__.replace(co_name=f"{block.__name__}_{ema}"), block.__globals__)
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    options |= {name: True for name in ROUNDED if name in torch._inductor.list_options()}
    kernel = torch.compile(own, dynamic=True, fullgraph=True, options=options)
    floats = [torch.zeros(FIRST, device=device) for _ in range(4 if block is adamw_block else 2)]
    packed = torch.zeros(FIRST // 4, dtype=torch.uint8, device=device)
    average = None if ema is None else torch.zeros(FIRST, dtype=ema, device=device)
    kernel(*floats, packed, average, scalars((1.0,) * (10 if block is adamw_block else 3), device))
    return kernel


@cache
def can_compile(device_type: str) -> bool:
    """Whether kernels can be built for this device; a warning is issued once if not."""
    try:
        library() if device_type == "cpu" else compiled(gate_block, None, torch.device(device_type))
    except (RuntimeError, OSError, ImportError) as error:
        missing = "a C++ compiler, such as g++"
        if device_type != "cpu":
            missing = "a C compiler, such as gcc" if find_spec("triton") else "Triton: pip install triton"
        warnings.warn(
            f"no compiled gate on {device_type} ({str(error).splitlines()[0][:100]}); using the plain gate: the same "
            f"numbers, but slower and with more memory. What the compiled one most likely lacks is {missing}",
            stacklevel=2,
        )
        return False
    return True


def fits(param: Tensor) -> bool:
    """Whether the compiled kernels accept this parameter; the plain gate handles the others."""
    plain = type(param) in (Tensor, torch.nn.Parameter)
    counted = param.numel() >= LEAST and (param.is_cpu or param.numel() < 1 << 31)  # Triton indexes with 32 bits
    return plain and param.dtype == torch.float32 and param.is_contiguous() and counted
