"""The gate in one pass over memory: packed signs, a small moving average, and kernels compiled in place.

Exact against `cplus.algorithm`: packing keeps the sign, which is all the mask uses. A moving average in 16 or 8 bits
is an option with a bound: rounding by at most h a step moves it by at most h / (1 - beta) in all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from cplus import algorithm

EmaType: TypeAlias = Literal["float32", "bfloat16", "uint8"]
WORTH_COMPILING = 4_000_000  # parameters; below, a compiled kernel saves less in a run than compiling it costs
CHUNK = 1 << 20  # coordinates packed at a time
SHARED = 1 << 15  # coordinates from which on it pays to wake other threads
FIRST = 1 << 17  # columns of the block a kernel is compiled for
LEVELS = 255.0  # a uint8 average counts in steps of 1/255


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs of a tensor at two bits each: 0 for zero, 1 for plus, 2 for minus.

    Byte j holds elements j, j + n/4, j + 2n/4 and j + 3n/4, so that a kernel reads four contiguous streams; the last
    n mod 4 elements share one byte of their own.
    """

    packed: Tensor
    tail: Tensor
    shape: torch.Size

    @classmethod
    def of(cls, gradient: Tensor) -> Signs:
        """Pack the signs of a gradient.

        >>> Signs.of(torch.tensor([3.0, -2.0, 0.0, 1e-30, -1.0])).unpacked()
        tensor([ 1, -1,  0,  1, -1], dtype=torch.int8)
        """
        head, tail = rows(gradient.detach().contiguous())
        return cls(_pack(head), _pack(tail), gradient.shape)

    @property
    def nbytes(self) -> int:
        """A quarter of a byte a coordinate."""
        return self.packed.nbytes + self.tail.nbytes

    def unpacked(self) -> Tensor:
        """The signs as -1, 0 and 1 in int8."""
        count = self.shape.numel()
        head = [self.packed >> 2 * k & 3 for k in range(4)]
        tail = [self.tail >> 2 * k & 3 for k in range(count % 4)]
        codes = torch.cat([*head, *tail]).to(torch.int8)
        return torch.where(codes == 2, -1, codes).to(torch.int8).view(self.shape)


def rows(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A contiguous tensor as four rows, and its last n mod 4 elements as so many rows of one.

    >>> [part.shape for part in rows(torch.zeros(2, 5))]
    [torch.Size([4, 2]), torch.Size([2, 1])]
    """
    flat = tensor.view(-1)
    cut = flat.numel() // 4 * 4
    return flat[:cut].view(4, -1), flat[cut:].view(-1, 1)


def _pack(values: Tensor) -> Tensor:
    """The codes of up to four rows in one byte a column, a chunk at a time so that little memory is taken on top."""
    packed = values.new_zeros(values.shape[1] if len(values) else 0, dtype=torch.uint8)
    for k, row in enumerate(values):
        for start in range(0, row.numel(), CHUNK):
            part = row[start : start + CHUNK]
            packed[start : start + CHUNK] |= ((part > 0).to(torch.uint8) + (part < 0).to(torch.uint8) * 2) << 2 * k
    return packed


def stored(ema: Tensor, like: Tensor) -> Tensor:
    """A moving average as it is kept: unchanged, rounded to bfloat16, or to the nearest of 256 levels."""
    return (ema * LEVELS).round().to(torch.uint8) if like.dtype == torch.uint8 else ema.to(like.dtype)


def read(ema: Tensor) -> Tensor:
    """A kept moving average as numbers in [0, 1]."""
    return ema.float() / LEVELS if ema.dtype == torch.uint8 else ema.to(torch.promote_types(ema.dtype, torch.float32))


def zeros(theta: Tensor, kind: EmaType) -> Tensor:
    """The average before the first step."""
    if kind == "float32":
        return algorithm.zeros(theta)
    return torch.zeros_like(theta, dtype=torch.uint8 if kind == "uint8" else torch.bfloat16)


def gate_numbers(beta: float, t: int) -> tuple[float, ...]:
    """The gate's scalars at step t; differences are taken in double precision, where 1 - 0.999 is exact enough."""
    return beta, 1.0 - beta, 1.0 - beta**t


def _gated(theta: Tensor, proposed: Tensor, code: Tensor, ema: Tensor, numbers: Sequence[Tensor]) -> Any:
    """Lines 10-13 of Algorithm 1 on one block of coordinates: the new parameters and the new average."""
    beta, rest, correction = numbers
    delta = proposed - theta
    conflict = ((code == 1) & (delta > 0)) | ((code == 2) & (delta < 0))
    average = beta * read(ema) + rest * (~conflict).to(torch.float32)
    kept = stored(average, ema)
    c = (read(kept) / correction).clamp(0.0, 1.0)
    return torch.lerp(theta, proposed, c), kept


@cache
def shifts(device: torch.device) -> Tensor:
    """Where the four signs of a byte stand, one row each; int32 because that is what vectorises."""
    return torch.tensor([[0], [2], [4], [6]], dtype=torch.int32, device=device)


def scalars(values: Sequence[float], device: torch.device) -> Tensor:
    """A step's numbers as a tensor, so that nothing recompiles, repeated for each row.

    Reading them by row gives every operation of a block the same two loops: without it the compiler flattens some,
    splits the block and writes the proposal to memory in between.
    """
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1).repeat(1, 4, 1).to(device)


def gate_block(theta: Tensor, param: Tensor, packed: Tensor, shift: Tensor, ema: Tensor, numbers: Tensor) -> None:
    """In place: `param` holds the proposal and receives the gated step. Blocks are 4 x n/4, signs n/4 bytes."""
    code = packed[None, :].to(torch.int32) >> shift & 3
    applied, kept = _gated(theta, param, code, ema, numbers.unbind())
    param.copy_(applied)
    ema.copy_(kept)


def adamw_block(
    param: Tensor, gradient: Tensor, m: Tensor, v: Tensor, packed: Tensor, shift: Tensor, ema: Tensor, numbers: Tensor
) -> None:
    """In place: AdamW's proposal and the gate on it in one pass, with no copy of the parameters.

    Source: Loshchilov and Hutter 2019, in the order of torch's fused kernel, but for one division by a scalar that is a
    product here: divisions are what limits this kernel once memory does not. A coordinate whose gradient is not finite
    proposes nothing and keeps its moments.
    """
    fine = gradient.abs() <= torch.finfo(gradient.dtype).max
    rest1, beta2, rest2, decay, step, root, eps, *gate = numbers.unbind()
    code = packed[None, :].to(torch.int32) >> shift & 3
    first = torch.lerp(m, gradient, rest1)
    second = beta2 * v + rest2 * gradient * gradient
    proposed = param * decay - step * first / (second.sqrt() * root + eps)
    applied, kept = _gated(param, torch.where(fine, proposed, param), code, ema, gate)
    param.copy_(applied)
    m.copy_(torch.where(fine, first, m))
    v.copy_(torch.where(fine, second, v))
    ema.copy_(kept)


def advance(ema: Tensor, numbers: Sequence[float]) -> None:
    """In place: the average of a tensor whose proposal is to stay, so that its mask is 1 everywhere."""
    beta, rest, _ = numbers
    ema.copy_(stored(beta * read(ema) + rest, ema))


def on_rows(
    block: Callable[..., None], tensors: Sequence[Tensor], signs: Signs, ema: Tensor | None, numbers: Tensor
) -> None:
    """The compiled block on the coordinates that fill four rows, the same function uncompiled on the last few."""
    ema = torch.zeros_like(tensors[0]) if ema is None else ema
    shift, last = shifts(ema.device), ema.numel() % 4
    kernel = compiled(block, ema.dtype, ema.device, torch.get_num_threads() if ema.numel() >= SHARED else 1)
    if not last:
        head = [_rows_of_four(t) for t in (*tensors, ema)]
        kernel(*head[:-1], signs.packed, shift, head[-1], numbers)
        return
    head, tail = ([part.detach() for part in parts] for parts in zip(*map(rows, (*tensors, ema)), strict=True))
    if head[0].numel():
        kernel(*head[:-1], signs.packed, shift, head[-1], numbers)
    block(*tail[:-1], signs.tail, shift[:last], tail[-1], numbers[:, :last])


def _rows_of_four(tensor: Tensor) -> Tensor:
    # Without detach the compiler guards on what the view was cut from, and builds a second kernel for vectors.
    return tensor.view(4, -1).detach()


@cache
def compiled(block: Callable[..., None], ema: torch.dtype, device: torch.device, threads: int) -> Callable[..., None]:
    """The block as one in-place kernel for every size; compiled once and kept in Inductor's cache.

    The compiler decides by the first call whether the kernel uses several threads, so that call is a large one. Its
    cache does not ask for how many threads a kernel was built unless the options say it.
    """
    # A copy of the code has a cache of its own, in which the one kernel there is needs no test whether it fits: what
    # could differ is in this function's arguments, and `fits` has refused the rest.
    own = FunctionType(block.__code__.replace(co_name=f"{block.__name__}_{ema}_{threads}"), block.__globals__)
    options: dict[str, Any] = {"cpp.threads": threads, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    kernel = torch.compile(own, dynamic=True, fullgraph=True, options=options)
    floats = [torch.zeros(4, FIRST, device=device) for _ in range(4 if block is adamw_block else 2)]
    average = torch.zeros(4, FIRST, dtype=ema, device=device)
    numbers = scalars([1.0] * (10 if block is adamw_block else 3), device)
    kernel(*floats, torch.zeros(FIRST, dtype=torch.uint8, device=device), shifts(device), average, numbers)
    return kernel


@cache
def can_compile(device_type: str) -> bool:
    """Whether Inductor builds kernels for this device here; said once where it does not."""
    probe = torch.zeros(4, 8, device=device_type)

    def double(x: Tensor) -> None:
        x.copy_(x * 2)

    try:
        torch.compile(double, dynamic=True, fullgraph=True)(probe)
    except (RuntimeError, OSError) as error:
        warnings.warn(
            f"no compiled gate on {device_type} ({str(error).splitlines()[0][:100]}); the plain gate is used: the same "
            "numbers, more time and memory. Install a C++ compiler to have it",
            stacklevel=2,
        )
        return False
    return True


def fits(param: Tensor) -> bool:
    """Whether the compiled kernels take this parameter; others go the plain way."""
    plain = type(param) in (Tensor, torch.nn.Parameter)
    return plain and param.dtype == torch.float32 and param.is_contiguous() and param.numel() >= 4
