"""Work that the first process leads: it sends parts of what takes long to the processes that wait for it.

Journals, locks and caches belong to the process that leads; the others compute what they are sent.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cplus import world

T = TypeVar("T")


@dataclass
class _Lead:
    size: int = 1
    known: Sequence[object] = ()


_lead = _Lead()


def count() -> int:
    """The number of processes that compute what this one leads, itself included."""
    return _lead.size


def in_turn(work: Callable[[], T], known: Sequence[object]) -> T:
    """The same work in every process: first in the first one, which the others help, then in the others.

    `known` are objects that each process has of its own, like the model: they are named in what is sent, not copied.
    """
    if world.size() == 1:
        return work()
    if not world.first():
        while (order := world.broadcast(None)) is not None:
            world.gathered(_result(order, known))
        with world.alone():
            return work()
    _lead.size, _lead.known = world.size(), known
    try:
        with world.alone():
            value = work()
    finally:
        _lead.size, _lead.known = 1, ()
    world.broadcast(None)
    return value


def divided(function: Callable[..., T], parts: Sequence[tuple[Any, ...]]) -> list[T]:
    """The function's result for each part, as many parts as processes at most; one process computes one of them."""
    if _lead.size == 1:
        return [function(*part) for part in parts]
    assert len(parts) <= _lead.size
    orders = _pickled((function, parts), _lead.known)
    with world.together(_lead.size):
        world.broadcast(orders)
        found = world.gathered(_result(orders, _lead.known))
    return found[: len(parts)]


def _result(orders: bytes, known: Sequence[object]) -> Any:
    """This process's part of what was sent; None where it has no part."""
    function, parts = _Unpickler(io.BytesIO(orders), known).load()
    return function(*parts[world.rank()]) if world.rank() < len(parts) else None


def _pickled(value: object, known: Sequence[object]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, known).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Names known objects by their place."""

    def __init__(self, file: io.BytesIO, known: Sequence[object]) -> None:
        super().__init__(file)
        self._places = {id(value): place for place, value in enumerate(known)}

    def persistent_id(self, value: object) -> int | None:
        return self._places.get(id(value))


class _Unpickler(pickle.Unpickler):
    """Puts this process's own objects in the place of known ones."""

    def __init__(self, file: io.BytesIO, known: Sequence[object]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, place: int) -> object:
        return self._known[place]
