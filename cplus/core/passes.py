"""The passes in which rows are computed, and the order in which the passes' gradients are added.

A sum of floating-point numbers depends on its order. With a fixed number of parts, any number of processes computes the
same passes over the same rows, pass k in process k mod n, and adds their gradients as one process does, one after
another: ((p0 + p1) + p2) + p3. The weights then do not depend on the number of processes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cplus.core.shards import Layout, local

CHUNK = 1 << 22
"""Numbers that a process exchanges at once: the memory of an exchange is twice theirs."""
SMALL = 1 << 16
"""Numbers that are converted at once: they stay in the processor's cache."""


UNEQUAL = "the passes of a batch reach different weights, so shards cannot add their gradients; add sharding ddp"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A pass of this process, while `live` of the processes have one; the others pass a row of weight 0.

    A pass `alone` is no part of a sum: a copy keeps its gradient to itself, and shards have computed the same one.
    """

    number: int = 0
    items: Sequence[int] = ()
    weight: float = 1.0
    live: int = 1
    first: bool = True
    last: bool = True
    alone: bool = False


def turns(batches: Sequence[Sequence[int]], where: Layout) -> Iterator[Turn]:
    """This process's turns: pass k is that of process k mod n. Under FSDP2 every process must take part in each.

    >>> [turn.items for turn in turns([[4, 1], [0], [3, 2]], Layout(rank=1, world=2))]
    [[0], [2]]
    """
    count = len(batches)
    for start in range(0, count, where.world):
        own = start + where.rank
        yield Turn(
            number=own,
            items=batches[own] if own < count else batches[-1][-1:],
            weight=float(own < count),
            live=min(where.world, count - start),
            first=start == 0,
            last=start + where.world >= count,
        )


@dataclass
class Passing:
    """How a model's passes are made; by default a pass of its own for each process, and sums in any order."""

    parts: int | None = None
    """The number of parts of a batch, if that is fixed."""
    shards: list[OrderedReduction] = field(default_factory=list)
    """The reductions of the model's shards, if they follow the order."""
    copies: bool = False
    """Whether each process has a copy of the weights, and the gradients are summed here."""

    def scale(self, where: Layout) -> int:
        """What a loss is multiplied by so that its gradients are summed: FSDP2 and ZeRO average over the processes."""
        return where.world if where.sharded and not self.shards else 1

    def backward(self, loss: Tensor, turn: Turn, params: Sequence[nn.Parameter]) -> None:
        """Add the gradients of all processes' passes of this turn to `.grad`, in order where that is fixed."""
        if self.shards:
            _into_shards(loss, turn, params, self.shards)
        elif self.copies and not turn.alone:
            _into_copies(loss, turn, params)
        else:
            loss.backward()  # type: ignore[no-untyped-call]


_PLAIN = Passing()


def passing(model: nn.Module) -> Passing:
    """How this model's passes are made."""
    return getattr(model, "cplus_passing", _PLAIN)


def arrange(model: nn.Module, parts: int, world: int) -> None:
    """Fix the passes and their order for a model, after FSDP2 has sharded it or not."""
    made = Passing(parts=parts)
    if world > 1:
        made.shards = [_reduction(module) for module in model.modules() if hasattr(module, "set_custom_reduce_scatter")]
        made.copies = not any(hasattr(p, "device_mesh") for p in model.parameters())
        if not made.copies and not made.shards:
            raise RuntimeError(
                f"torch {torch.__version__} cannot add the gradients of shards in order (FSDPModule has no "
                "set_custom_reduce_scatter); install a newer one, or add sharding ddp"
            )
    model.cplus_passing = made  # type: ignore[assignment]


def orders_shards() -> bool:
    """Whether this version of torch lets us order the sums of shards: 2.13 does, 2.8 does not."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_custom_reduce_scatter")


def _reduction(module: nn.Module) -> OrderedReduction:
    made = OrderedReduction()
    module.set_custom_reduce_scatter(made)  # type: ignore[operator]
    return made


class OrderedReduction:
    """A reduction of FSDP2 that adds the processes' gradients in the order of their ranks, to those of earlier turns.

    It has the methods of FSDP2's `ReduceScatter`. The parts are exchanged and added here; a process sends as
    much as in a reduction by a ring. The result is a sum, where FSDP2 itself takes the mean.
    """

    def __init__(self) -> None:
        self._live, self._keeps = 1, False
        self._total: Tensor | None = None

    def begin(self, turn: Turn) -> None:
        """The next reduction is that of this turn."""
        self._live, self._keeps = turn.live, not turn.last
        if turn.first:
            self._total = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a reduction's input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Fill the output with this process's part of the sum."""
        parts = input_tensor.view(group.size(), -1)
        if self._total is not None and self._total.shape != output_tensor.shape:
            raise RuntimeError(UNEQUAL)
        step = -(-CHUNK // group.size())
        for start in range(0, parts.shape[1], step):
            sent = parts[:, start : start + step].contiguous()
            found = torch.empty_like(sent)
            dist.all_to_all_single(found, sent, group=group)
            earlier = None if self._total is None else self._total[start : start + step]
            _add(output_tensor[start : start + step], earlier, found[: self._live])
        self._total = output_tensor if self._keeps else None


def _into_shards(loss: Tensor, turn: Turn, params: Sequence[nn.Parameter], shards: Sequence[OrderedReduction]) -> None:
    """The reductions hold the gradients of earlier turns; `.grad` is empty while they add to them."""
    reached = [] if turn.first else [p for p in params if p.grad is not None]
    for p in reached:
        p.grad = None
    for shard in shards:
        shard.begin(turn)
    loss.backward()  # type: ignore[no-untyped-call]
    if any(p.grad is None for p in reached):
        raise RuntimeError(UNEQUAL)


def _into_copies(loss: Tensor, turn: Turn, params: Sequence[nn.Parameter]) -> None:
    earlier = [None if turn.first else p.grad for p in params]
    for p, before in zip(params, earlier, strict=True):
        p.grad = None if before is not None else p.grad
    loss.backward()  # type: ignore[no-untyped-call]
    for p, before in zip(params, earlier, strict=True):
        if p.grad is None:
            p.grad = before
        else:
            _add_copies(p.grad, before, turn.live)


def _add_copies(gradient: Tensor, earlier: Tensor | None, live: int) -> None:
    """In place: the sum of all processes' gradients, after the earlier ones."""
    flat, step = gradient.view(-1), -(-CHUNK // dist.get_world_size())
    for start in range(0, flat.numel(), step):
        own = flat[start : start + step]
        found = own.new_empty(dist.get_world_size() * own.numel())
        dist.all_gather_into_tensor(found, own)
        before = None if earlier is None else earlier.view(-1)[start : start + step]
        _add(own, before, found.view(-1, own.numel())[:live])


def _add(out: Tensor, earlier: Tensor | None, parts: Tensor) -> None:
    """In place: out = (earlier + parts[0]) + parts[1] + ..."""
    if earlier is None:
        earlier, parts = parts[0], parts[1:]
    out.copy_(earlier)
    for part in parts:
        out.add_(part)


def clip(params: Sequence[nn.Parameter], limit: float, where: Layout) -> None:
    """Scale gradients in place to at most this norm, which is summed in double precision over all processes.

    The order of this sum depends on the shards; in double precision it does not change the factor, a float32.
    """
    gradients = [local(p.grad) for p in params if p.grad is not None]
    squared = sum(_squared(gradient) for gradient in gradients)
    if where.sharded:
        (squared,) = where.sums([squared], gradients[0].device)
    factor = limit / (squared**0.5 + 1e-6)
    if not factor >= 1.0:  # also if it is not a number
        for gradient in gradients:
            gradient.mul_(factor)


def _squared(gradient: Tensor) -> float:
    parts = (part.double() for part in torch.split(gradient.reshape(-1), SMALL))
    return float(torch.stack([torch.dot(part, part) for part in parts]).sum())


@contextmanager
def drawing(device: torch.device) -> Iterator[Callable[[int], object]]:
    """Gives each pass of an update random numbers of its own, whichever process computes it, as dropout needs them."""
    first = int(torch.randint(2**62, ()))  # the same in all processes
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        yield lambda number: torch.manual_seed(first + number)
