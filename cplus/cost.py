"""Cost accounting: rows, tokens, and FLOPs by the paper's leading-order dense-transformer approximation."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What passed through the model: `padded` tokens forward and backward, `forward` padded tokens forward only."""

    rows: int = 0
    tokens: int = 0
    padded: int = 0
    forward: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.rows + other.rows,
            self.tokens + other.tokens,
            self.padded + other.padded,
            self.forward + other.forward,
        )

    def flops(self, parameters: int) -> int:
        """Training FLOPs, which do not determine the elapsed time.

        Paper: App. E.12.    6 P L forward and backward, 2 P L forward only, L padded tokens

        >>> Work(rows=1, tokens=9, padded=10).flops(100)
        6000
        """
        return parameters * (6 * self.padded + 2 * self.forward)


def cost_row(parameters: int, *, training: Work, preservation: Work) -> dict[str, int]:
    """FLOPs of both kinds of work, then their rows and tokens, with the field names used in records."""
    works = {"training": training, "preservation": preservation}
    return {
        **{f"{name}_flops": work.flops(parameters) for name, work in works.items()},
        **{f"{name}_{k}": v for name, work in works.items() for k, v in asdict(work).items()},
    }
