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
    """Codes of every weight, and how many weights lie above each code, counted exactly and without sorting."""

    def __init__(self, codes: Sequence[Tensor]) -> None:
        self.codes = list(codes)
        counts = torch.zeros(_CODES, dtype=torch.int64)
        for own in self.codes:
            for part in torch.split(own.flatten(), _CHUNK):
                counts += torch.bincount(part.int() - _NEVER, minlength=_CODES).cpu()
        counts[0] = 0  # weights that did not move
        self.moved = int(counts.sum())
        self._above = counts.flip(0).cumsum(0).flip(0)

    def threshold(self, share: float) -> int:
        """The lowest code such that at most this share of the moved weights has it or a higher one."""
        # No score has the last code, which is that of no number, so that even a share of 0 has a threshold.
        return int((self._above[1:] <= share * self.moved).nonzero()[0]) + 1 + _NEVER

    def count(self, threshold: int) -> int:
        """The number of weights with this code or a higher one."""
        return int(self._above[threshold - _NEVER])


@torch.no_grad()
def undo(
    params: Sequence[Tensor], base: Sequence[Tensor], tuned: Sequence[Tensor], codes: Sequence[Tensor], threshold: int
) -> None:
    """Write the base's value where a weight's code reaches the threshold, else the tuned one; both are exact."""
    for p, before, after, own in zip(params, base, tuned, codes, strict=True):
        p.copy_(torch.where(own >= threshold, before.to(after), after))
