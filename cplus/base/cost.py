"""Cost accounting: rows, tokens, and FLOPs by the paper's leading-order dense-transformer approximation."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from operator import add


@dataclass(frozen=True, slots=True)
class Work:
    """What passed through the model: `padded` tokens forward and backward, `forward` padded tokens forward only."""

    rows: int = 0
    tokens: int = 0
    padded: int = 0
    forward: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*map(add, astuple(self), astuple(other)))

    def flops(self, parameters: int) -> int:
        """Training FLOPs, which do not determine the elapsed time.

        Paper: App. E.12.    6 P L forward and backward, 2 P L forward only, L padded tokens

        >>> Work(rows=1, tokens=9, padded=10).flops(100)
        6000
        """
        return parameters * (6 * self.padded + 2 * self.forward)


TRAINING_RESERVE = 16
"""Bytes per parameter left free for training when a projection stores vectors: a gradient, two moments, passes."""
PASS_TOKENS = 2048
"""Tokens of a pass of the largest size."""


def activation_bytes(*, layers: int, width: int, inner: int, vocabulary: int) -> int:
    """Estimated bytes of activations in one pass of the largest size, in float32.

    A dense layer keeps about 16 vectors of the width for the backward pass, and three of the inner width; at the
    target's positions there are the logits, their softmax and their gradient.
    """
    token = 4 * layers * (16 * width + 3 * inner)
    return PASS_TOKENS * token + PASS_TOKENS // 4 * 3 * 4 * vocabulary


def cost_row(parameters: int, *, training: Work, preservation: Work) -> dict[str, int]:
    """FLOPs of both kinds of work, then their rows and tokens, with the field names used in records."""
    works = {"training": training, "preservation": preservation}
    return {
        **{f"{name}_flops": work.flops(parameters) for name, work in works.items()},
        **{f"{name}_{k}": v for name, work in works.items() for k, v in asdict(work).items()},
    }
