"""A method that computes in another precision while weights, optimizer and gate stay float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cplus import models
from cplus.cost import Work
from cplus.data.encoded import Encoded
from cplus.evidence import Evidence, Reference, Source
from cplus.methods import Material, Method, Rows
from cplus.objectives import Backward, Build


def in_precision(method: Method, dtype: str, device: torch.device) -> Method:
    """The method with its objective and evidence in this precision.

    Each pass opens the context anew: autocast remembers the weights it cast until its context ends, and they move.
    """
    if dtype == "float32":
        return method

    def reduction(model: nn.Module, sources: tuple[Source, ...]) -> Evidence:
        return _Evidence(method.reduction(model, sources), dtype, device)

    return dataclasses.replace(method, objective=_Objective(method.objective, dtype, device), reduction=reduction)


@dataclass(frozen=True)
class _Evidence:
    inner: Evidence
    dtype: str
    device: torch.device

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        with models.computing(self.dtype, self.device):
            return self.inner(params, refresh)


@dataclass(frozen=True)
class _Objective:
    inner: Build
    dtype: str
    device: torch.device

    @property
    def needs(self) -> tuple[Rows, ...]:
        return self.inner.needs

    @property
    def bytes_per_parameter(self) -> float:
        return self.inner.bytes_per_parameter

    @property
    def anchor_passes(self) -> float:
        return self.inner.anchor_passes

    @property
    def read_by_base(self) -> tuple[Rows, ...]:
        return self.inner.read_by_base

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        with models.computing(self.dtype, self.device):
            inner = self.inner(model, material)

        def backward(rows: Sequence[Encoded]) -> tuple[float, Work]:
            with models.computing(self.dtype, self.device):
                return inner(rows)

        return backward
