"""What a model answered, example by example: plain values that reports read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One answer: the index of a choice, or free text; `correct` is None where the right answer is not known.

    `scores` are the candidates' mean token log-likelihoods and `confidence` the softmax over them at the answer; for
    free text `scores` holds the answer's own and `confidence` is its geometric mean token probability.
    """

    id: str
    answer: int | str
    correct: bool | None
    confidence: float
    scores: tuple[float, ...]
    num_tokens: tuple[int, ...]

    @property
    def right(self) -> bool:
        """`correct`, where it must be known."""
        if self.correct is None:
            raise ValueError(f"prediction {self.id} was never judged; score it by exact match or a validator first")
        return self.correct


def to_row(prediction: Prediction) -> dict[str, Any]:
    """The JSON row of a prediction: the inverse of `from_row`."""
    return {
        "id": prediction.id,
        "answer": prediction.answer,
        "correct": prediction.correct,
        "confidence": prediction.confidence,
        "scores": list(prediction.scores),
        "num_tokens": list(prediction.num_tokens),
    }


def from_row(row: Mapping[str, Any]) -> Prediction:
    """Read a row written by `to_row`.

    >>> p = Prediction(id="a", answer=1, correct=True, confidence=0.5, scores=(-2.0, -1.0), num_tokens=(1, 1))
    >>> from_row(to_row(p)) == p
    True
    """
    return Prediction(
        id=row["id"],
        answer=row["answer"],
        correct=row["correct"],
        confidence=row["confidence"],
        scores=tuple(row["scores"]),
        num_tokens=tuple(row["num_tokens"]),
    )
