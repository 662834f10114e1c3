"""The processes that do one job together, and the work that the first of them leads."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from cplus.base.files import fingerprint
from cplus.base.terminal import console, output

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


# The processes that do one job together: who is first, what all of them agree on, and how all of them end.
#
# torchrun and Accelerate start the processes and describe them in the environment. Outside `joined` every process is
# alone: rank 0 of 1.


T = TypeVar("T")
Row = TypeVar("Row")

_MEETING, _ONE_MACHINE = timedelta(minutes=5), timedelta(seconds=45)
"""How long processes wait for each other at the start: on several machines, and on one."""
_WORKING = timedelta(days=30)
"""How long they wait for one that works alone; a process that ends is noticed at once, whatever this is."""
_FAILED = "cplus/failed"


class Elsewhere(Exception):
    """Another process of this job failed and has reported it."""


class Lost(ValueError):
    """Another process of this job ended without a report."""


@dataclass
class _World:
    rank: int = 0
    size: int = 1
    store: Store | None = None


_here = _World()


def started() -> tuple[int, int]:
    """The rank of this process and the number of processes, as the launcher says."""
    size = int(os.environ.get("WORLD_SIZE") or 1)
    return (int(os.environ.get("RANK") or 0), size) if size > 1 and "RANK" in os.environ else (0, 1)


def size() -> int:
    """The number of processes that do this job."""
    return _here.size


def rank() -> int:
    """The number of this process, from 0."""
    return _here.rank


def first() -> bool:
    """Whether this process writes, and speaks for all."""
    return _here.rank == 0


def neighbours() -> int:
    """The number of processes that the launcher started on this machine."""
    everywhere = started()[1]
    return int(os.environ.get("LOCAL_WORLD_SIZE") or everywhere) if everywhere > 1 else 1


@contextmanager
def joined() -> Iterator[None]:
    """Do a job together with the other processes that the launcher started; if one fails, all of them end.

    One process reports the failure, the others are silent: the first one if the error says that all `agreed` on it,
    otherwise the one that fails first.
    """
    if _here.size > 1 or started()[1] == 1:
        yield
        return
    import torch.distributed as dist

    own = not dist.is_initialized()
    console.quiet = output.quiet = started()[0] > 0
    try:
        _connect()
        yield
        dist.barrier()
        if own:
            dist.destroy_process_group()
    except Elsewhere:
        console.quiet = True
        raise
    except BaseException as error:
        reports = first() if getattr(error, "agreed", False) else _reports(error)
        console.quiet = not reports
        if not _is_lost(error):
            raise
        sentence = f"another of the {started()[1]} processes ended: it was killed, or ran out of memory"
        raise (Lost if reports else Elsewhere)("; ".join([sentence, *getattr(error, "__notes__", ())])) from error
    finally:
        _here.rank, _here.size, _here.store = 0, 1, None


def _connect() -> None:
    """Meet the other processes: NCCL between GPUs, gloo between CPUs and for everything that is not a tensor."""
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    own_rank, world = started()
    if torch.cuda.is_available():
        device, count = int(os.environ.get("LOCAL_RANK") or 0), torch.cuda.device_count()
        if device >= count:
            raise ValueError(
                f"process {own_rank} has no GPU of its own: {socket.gethostname()} has {count}; start at most {count} "
                "processes there, or set CUDA_VISIBLE_DEVICES= to use the CPU"
            )
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if not dist.is_initialized():
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        meeting = _ONE_MACHINE if os.environ.get("LOCAL_WORLD_SIZE") == str(world) else _MEETING
        try:
            if own_rank:
                _find_first(meeting)
            store, _, _ = next(rendezvous("env://", own_rank, world, timeout=meeting))
            dist.init_process_group(backend, store=store, rank=own_rank, world_size=world, timeout=_WORKING)
        except (RuntimeError, ValueError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"the {world} processes could not meet at {address} (MASTER_ADDR, MASTER_PORT): {reason}; choose "
                "another port, or torchrun --standalone on one machine"
            ) from error
    _here.rank, _here.size = dist.get_rank(), dist.get_world_size()
    _here.store = dist.distributed_c10d._get_default_store()


def _find_first(meeting: timedelta) -> None:
    """Wait until the first process listens; torch alone would wait three times as long, and report at length."""
    address, end = _first_address(), time.monotonic() + meeting.total_seconds()
    while not _listens(address):
        if time.monotonic() > end:
            raise TimeoutError(f"the first process did not start within {meeting.seconds} seconds")
        time.sleep(0.2)


def _first_address() -> tuple[str, int]:
    return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)


def _listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=5).close()
    except OSError:
        return False
    return True


def _is_lost(error: BaseException) -> bool:
    """Whether an operation failed because another process is gone."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    marks = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks)


def _reports(error: BaseException) -> bool:
    """Whether this process is the first to fail, and so the one that reports."""
    if _here.store is None:  # they have not met; if the first process is missing, the second reports
        return started()[0] == (1 if isinstance(error.__cause__, TimeoutError) else 0)
    me = str(_here.rank)
    try:
        if _listens(_first_address()):  # otherwise torch would report at length that its store is gone
            return _here.store.compare_set(_FAILED, "", me).decode() == me
    except RuntimeError:
        pass
    return _here.rank == 1  # the store went with the first process that held it


def tell_launcher(sentence: str) -> None:
    """Give torchrun the sentence for its own report, in place of the advice to enable tracebacks.

    torchrun ends with code 1 whatever the code of a process is; its report has the code and this sentence.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place and started()[1] > 1:
        body = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(place).write_text(json.dumps({"message": body}), encoding="utf-8")


def named(sentence: str) -> str:
    """A sentence with the name of its process, where that is not the first."""
    own, world = started()
    return f"process {own} of {world} on {socket.gethostname()}: {sentence}" if own else sentence


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process works as if it were the only one; the others wait for it elsewhere."""
    kept = (_here.rank, _here.size)
    _here.rank, _here.size = 0, 1
    try:
        yield
    finally:
        _here.rank, _here.size = kept


def shared(work: Callable[[], T]) -> T:
    """What the first process computes, in all of them; they wait for it, and a failure ends all of them."""
    if _here.size == 1:
        return work()
    value = None
    if first():
        with alone():
            value = work()
    found: T = broadcast(value)
    return found


def broadcast(value: Any) -> Any:
    """The first process's value, in every process."""
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def gathered(value: T) -> list[T]:
    """Every process's value, in the order of their ranks."""
    if _here.size == 1:
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * _here.size
    dist.all_gather_object(found, value)
    return found


def agree(what: str, value: object) -> None:
    """Refuse a value, of plain JSON types, that differs between the processes."""
    marks = gathered(fingerprint(value))
    other = next((i for i, mark in enumerate(marks) if mark != marks[0]), None)
    if other is not None:
        refuse(
            f"the {_here.size} processes differ in {what}: process {other} has {marks[other][:12]}, process 0 has "
            f"{marks[0][:12]}; give all of them the same command, files and versions"
        )


def refuse(sentence: str) -> NoReturn:
    """Refuse what all processes have found; the first one reports it."""
    raise ValueError(sentence) if first() else Elsewhere(sentence)


def largest(values: Sequence[int]) -> list[int]:
    """The largest of the processes' numbers, place by place: how all of them notice what one of them saw."""
    if _here.size == 1:
        return list(values)
    import torch
    import torch.distributed as dist

    box = torch.tensor(values)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return [int(value) for value in box.tolist()]


def spread(rows: Sequence[Row], work: Callable[[Sequence[Row]], Sequence[T]]) -> list[T]:
    """The results for all rows, in their order, each computed by one of the processes."""
    if _here.size == 1:
        return list(work(rows))
    own = rows[_here.rank :: _here.size]
    parts = gathered(list(work(own)) if own else [])
    return [parts[i % len(parts)][i // len(parts)] for i in range(len(rows))]


# Work that the first process does before the others: journals, locks and caches belong to it.


def in_turn(work: Callable[[], T]) -> T:
    """The same work in every process: first in the first one, which fills the caches, then in the others."""
    if size() == 1:
        return work()
    if not first():
        broadcast(None)
    with alone():
        value = work()
    if first():
        broadcast(None)
    return value


# Ctrl-C and SIGTERM: the job stops at once where nothing is lost, else after the current update.


class Interrupted(KeyboardInterrupt):
    """The job was stopped by a signal; its state is saved. `agreed`: all its processes stop at the same point."""

    def __init__(self, number: int, sentence: str = "stopped", *, agreed: bool = False) -> None:
        super().__init__(sentence)
        self.number, self.agreed = number, agreed

    @property
    def exit_code(self) -> int:
        """What a shell expects: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.number


class Interruption:
    """Signals received while the job runs."""

    def __init__(self) -> None:
        self._patient = False
        self._received: int | None = None

    @contextmanager
    def watching(self) -> Iterator[Interruption]:
        """Handle the signals; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before: dict[int, Callable[..., Any] | int | None] = {
            number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield self
        except BaseException:
            if size() > 1:  # a launcher stops the others as soon as one fails; let this one report in peace
                before = dict.fromkeys(before, signal.SIG_IGN)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Inside, the first signal only sets `received`; the second stops at once."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    @property
    def received(self) -> int | None:
        """The signal received, if any."""
        return self._received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._patient and self._received is None:
            self._received = number
            console.print("stopping after this update; press again to stop at once")
            return
        raise Interrupted(number)
