"""Training some rows of a parameter, such as new vocabulary entries, while its other rows keep every bit."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, TypeAlias

import torch
from torch import Tensor, nn

from cplus.ranks import local, local_rows

OnlyRows: TypeAlias = Mapping[str, Sequence[int]]
"""The rows that train, by the name of their parameter; all rows of the other parameters do."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one parameter that train: `here` are those that this process holds, by their local numbers."""

    count: int
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


def chosen_rows(only: OnlyRows, model: nn.Module, params: Sequence[nn.Parameter]) -> dict[int, Rows]:
    """The rows by the position of their parameter; tied parameters may be named by either name."""
    known = dict(model.named_parameters(remove_duplicate=False))
    positions = {id(p): i for i, p in enumerate(params)}
    found: dict[int, Rows] = {}
    asked: dict[int, tuple[str, list[int]]] = {}
    for name, rows in only.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else "; model.named_parameters() lists them"
            raise ValueError(f"only_rows names {name!r}, and the model has no such parameter{hint}")
        p = known[name]
        if id(p) not in positions:
            raise ValueError(
                f"only_rows names {name!r}, which the optimizer does not train; give it to the optimizer and make it "
                "require gradients"
            )
        numbers = checked(name, p, rows)
        position = positions[id(p)]
        other, same = asked.setdefault(position, (name, numbers))
        if same != numbers:
            raise ValueError(f"only_rows gives {other!r} and {name!r} different rows, but they are one tied parameter")
        trains = torch.zeros(p.shape[0], dtype=torch.bool)
        trains[numbers] = True
        here = local_rows(trains, p).nonzero().flatten().to(local(p).device)
        found[position] = Rows(count=len(numbers), here=here)
    return found


def checked(name: str, p: nn.Parameter, rows: Sequence[int]) -> list[int]:
    """The row numbers in order, each once."""
    if p.ndim < 1:
        raise ValueError(f"only_rows names {name!r}, which is a single number and has no rows")
    if not isinstance(rows, Iterable):
        raise TypeError(f"the rows of {name!r} must be a list of whole numbers, got {type(rows).__name__}")
    listed = rows.tolist() if isinstance(rows, Tensor) else list(rows)
    wrong = [row for row in listed if isinstance(row, bool) or not isinstance(row, SupportsIndex)]
    if wrong:
        raise TypeError(f"the rows of {name!r} must be whole numbers counted from 0, got {wrong[0]!r}")
    outside = [row for row in listed if not 0 <= row < p.shape[0]]
    if outside:
        raise ValueError(
            f"{name!r} has the rows 0 to {p.shape[0] - 1}, and only_rows names {outside[0]}; after adding tokens, call "
            "model.resize_token_embeddings() before building the optimizer"
        )
    if not listed:
        raise ValueError(f"only_rows gives {name!r} no row to train; set requires_grad=False instead to freeze it")
    return sorted({int(row) for row in listed})
