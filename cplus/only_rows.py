"""Training some rows of a parameter, such as new vocabulary entries, while its other rows keep every bit."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, SupportsIndex, TypeAlias

import torch
from torch import Tensor, nn

from cplus.ranks import local, local_rows
from cplus.zero import Fragment, Zero

OnlyRows: TypeAlias = Mapping[str, Sequence[int]]
"""The rows that train, by the name of their parameter; all rows of the other parameters do."""


@dataclass(frozen=True, kw_only=True)
class RowChoice:
    """The rows of one parameter that train, in order, of all that it has; `size` counts the coordinates of a row."""

    name: str
    rows: list[int]
    total: int
    size: int

    def others(self) -> list[tuple[int, int]]:
        """The rows that do not train, as runs from a first row to one after the last.

        >>> RowChoice(name="w", rows=[2, 3, 6], total=8, size=1).others()
        [(0, 2), (4, 6), (7, 8)]
        """
        edges = [-1, *self.rows, self.total]
        return [(a + 1, b) for a, b in pairwise(edges) if a + 1 < b]


class Untrained(Protocol):
    """The part of a tensor that does not train."""

    def put_back(self, param: Tensor, theta: Tensor) -> None:
        """In place: what does not train has its value before the step, whatever the optimizer did to it."""
        ...

    def only(self, evidence: Tensor) -> Tensor:
        """The evidence with 0 for what does not train: nothing is proposed for it, so it counts as admitted."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainedRows:
    """The rows of one parameter that train: `here` are those that this process holds, by their local numbers."""

    here: Tensor

    def put_back(self, param: Tensor, theta: Tensor) -> None:
        """In place: every other row has its value before the step, whatever the optimizer did to it.

        param[i] = param[i] if i in rows else theta[i]
        """
        moved = param.index_select(0, self.here)
        param.copy_(theta)
        param.index_copy_(0, self.here, moved)

    def only(self, evidence: Tensor) -> Tensor:
        """The evidence with 0 for every other row: nothing is proposed for it, so it counts as admitted."""
        return torch.zeros_like(evidence).index_copy_(0, self.here, evidence.index_select(0, self.here))


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The coordinates of a flat ZeRO partition that do not train, as runs from a first one to one after the last."""

    runs: tuple[tuple[int, int], ...]

    def put_back(self, param: Tensor, theta: Tensor) -> None:
        """In place: every coordinate of a run has its value before the step."""
        for first, end in self.runs:
            param[first:end] = theta[first:end]

    def only(self, evidence: Tensor) -> Tensor:
        """The evidence with 0 in every run."""
        found = evidence.clone()
        for first, end in self.runs:
            found[first:end] = 0
        return found


def chosen_rows(only: OnlyRows, model: nn.Module, trained: Sequence[nn.Parameter]) -> list[RowChoice]:
    """The rows by the first name of their parameter; tied parameters may be named by either name."""
    known = dict(model.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in model.named_parameters()}
    trains = {id(p) for p in trained}
    found: dict[str, RowChoice] = {}
    asked: dict[str, str] = {}
    for name, rows in only.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else "; model.named_parameters() lists them"
            raise ValueError(f"only_rows names {name!r}, and the model has no such parameter{hint}")
        p = known[name]
        if id(p) not in trains:
            raise ValueError(
                f"only_rows names {name!r}, which the optimizer does not train; give it to the optimizer and make it "
                "require gradients"
            )
        shape: torch.Size = getattr(p, "ds_shape", p.shape)  # ZeRO 3 leaves the parameter itself empty
        numbers = checked(name, shape, rows)
        one = first[id(p)]
        same = found.setdefault(one, RowChoice(name=one, rows=numbers, total=shape[0], size=shape[1:].numel()))
        if same.rows != numbers:
            raise ValueError(
                f"only_rows gives {asked[one]!r} and {name!r} different rows, but they are one tied parameter"
            )
        asked[one] = name
    return list(found.values())


def rows_here(
    chosen: Sequence[RowChoice], model: nn.Module, params: Sequence[nn.Parameter], zero: Zero | None
) -> dict[int, Untrained]:
    """What does not train of the part that this process holds, by the position of the parameter or partition."""
    if zero is not None:
        return dict(runs_here(chosen, zero.fragments))
    known = dict(model.named_parameters())
    positions = {id(p): i for i, p in enumerate(params)}
    found: dict[int, Untrained] = {}
    for choice in chosen:
        p = known[choice.name]
        trains = torch.zeros(choice.total, dtype=torch.bool)
        trains[choice.rows] = True
        found[positions[id(p)]] = TrainedRows(here=local_rows(trains, p).nonzero().flatten().to(local(p).device))
    return found


def runs_here(chosen: Sequence[RowChoice], fragments: Sequence[Fragment]) -> dict[int, Runs]:
    """What does not train, by the number of the partition; a partition may hold a part of a row."""
    others = {choice.name: [(a * choice.size, b * choice.size) for a, b in choice.others()] for choice in chosen}
    found: dict[int, list[tuple[int, int]]] = {}
    for f in fragments:
        for first, end in others.get(f.name, ()):
            first, end = max(first, f.start), min(end, f.start + f.size)
            if first < end:
                found.setdefault(f.partition, []).append((first - f.start + f.offset, end - f.start + f.offset))
    return {partition: Runs(runs=tuple(runs)) for partition, runs in found.items()}


def checked(name: str, shape: torch.Size, rows: Sequence[int]) -> list[int]:
    """The row numbers in order, each once."""
    if not shape:
        raise ValueError(f"only_rows names {name!r}, which is a single number and has no rows")
    if not isinstance(rows, Iterable):
        raise TypeError(f"the rows of {name!r} must be a list of whole numbers, got {type(rows).__name__}")
    listed = rows.tolist() if isinstance(rows, Tensor) else list(rows)
    wrong = [row for row in listed if isinstance(row, bool) or not isinstance(row, SupportsIndex)]
    if wrong:
        raise TypeError(f"the rows of {name!r} must be whole numbers counted from 0, got {wrong[0]!r}")
    outside = [row for row in listed if not 0 <= row < shape[0]]
    if outside:
        raise ValueError(
            f"{name!r} has the rows 0 to {shape[0] - 1}, and only_rows names {outside[0]}; after adding tokens, call "
            "model.resize_token_embeddings() before building the optimizer"
        )
    if not listed:
        raise ValueError(f"only_rows gives {name!r} no row to train; set requires_grad=False instead to freeze it")
    return sorted({int(row) for row in listed})
