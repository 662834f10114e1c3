"""The order in which weights are undone: a score per weight, two bytes each, and the weights above a threshold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Score: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From one tensor's past importance, new importance and change (tuned - base) to a score: higher is undone sooner."""

DAMPING = 1e-3
_NEVER = -(2**15)
"""The code of a weight that did not move; below that of every score."""
_CODES = 2**16
_CHUNK = 2**24


def ratio(past: Tensor, new: Tensor, delta: Tensor) -> Tensor:
    """F_past / (F_new + 1e-3 mean(F_new)), the mean over the tensor.

    >>> ratio(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.1, 0.1])).tolist()
    [1.9980019330978394, 0.0]
    """
    damping = (DAMPING * new.mean()).clamp(min=torch.finfo(new.dtype).tiny)
    return past / (new + damping)


def blame(gradient: Tensor, delta: Tensor) -> Tensor:
    """How much of the rise of the past loss a weight's change explains, to first order; above 0 it did harm.

    >>> blame(torch.tensor([0.5, -0.5]), torch.tensor([0.1, 0.1])).tolist()
    [0.05000000074505806, -0.05000000074505806]
    """
    return gradient * delta


def encode(scores: Tensor, delta: Tensor) -> Tensor:
    """Scores as int16 codes in the same order: the bits of their bfloat16, which tell apart scores 1 % apart.

    >>> encode(torch.tensor([-2.0, 0.5, 3.0, 9.0]), torch.tensor([1.0, 1.0, -1.0, 0.0])).tolist()
    [-16385, 16128, 16448, -32768]
    """
    if not bool(torch.isfinite(scores).all()):
        raise FloatingPointError("expected finite scores, got one that is not; check the score function")
    bits = (scores.to(torch.bfloat16) + 0.0).view(torch.int16)  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFF, bits)  # a larger negative number has larger bits
    return torch.where(delta == 0, _NEVER, ordered).to(torch.int16)


class Ranking:
    """Codes of every weight, and how many weights lie above each code, counted exactly and without sorting.

    A share is one of the weights, or with `by_sum`, where all scores are positive, one of the sum of their scores.
    """

    def __init__(self, codes: Sequence[Tensor], *, by_sum: bool = False) -> None:
        self.codes = list(codes)
        counts = torch.zeros(_CODES, dtype=torch.int64)
        for own in self.codes:
            for part in torch.split(own.flatten(), _CHUNK):
                counts += torch.bincount(part.int() - _NEVER, minlength=_CODES).cpu()
        counts[0] = 0  # weights that did not move
        self._above = counts.flip(0).cumsum(0).flip(0)
        weighed = counts * _values() if by_sum else counts
        self._weight = weighed.flip(0).cumsum(0).flip(0)

    def threshold(self, share: float) -> int:
        """The lowest code such that at most this share of the weights, or of the sum, has it or a higher one."""
        # No score has the last code, which is that of no number, so that even a share of 0 has a threshold.
        return int((self._weight[1:] <= share * self._weight[0]).nonzero()[0]) + 1 + _NEVER

    def count(self, threshold: int) -> int:
        """The number of weights with this code or a higher one."""
        return int(self._above[threshold - _NEVER])


def _values() -> Tensor:
    """The score of each code from 0 on, in double precision; 0 for a code that no number has, and below."""
    values = torch.arange(-_NEVER, dtype=torch.int16).view(torch.bfloat16).double().nan_to_num(0.0, posinf=0.0)
    return torch.cat([torch.zeros(-_NEVER, dtype=torch.float64), values])


@torch.no_grad()
def undo(
    params: Sequence[Tensor], base: Sequence[Tensor], tuned: Sequence[Tensor], codes: Sequence[Tensor], threshold: int
) -> None:
    """Write the base's value where a weight's code reaches the threshold, else the tuned one; both are exact."""
    for p, before, after, own in zip(params, base, tuned, codes, strict=True):
        p.copy_(torch.where(own >= threshold, before.to(after), after))
