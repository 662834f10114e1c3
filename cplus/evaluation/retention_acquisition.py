"""Before and after, row by row: Retention, Acquisition, Correction and the flips they are made of."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from cplus.data.predictions import Prediction
from cplus.evaluation.statistics import Rate, share

Kind: TypeAlias = Literal["kept", "lost", "gained", "still_wrong"]
_KINDS: dict[tuple[bool, bool], Kind] = {
    (True, True): "kept",
    (True, False): "lost",
    (False, True): "gained",
    (False, False): "still_wrong",
}


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One row before and after."""

    id: str
    kind: Kind
    before: int | str
    after: int | str
    confidence_before: float
    confidence_after: float

    def row(self) -> dict[str, Any]:
        """The JSON row."""
        return asdict(self)


def flips(before: Sequence[Prediction], after: Sequence[Prediction]) -> list[Flip]:
    """The flip table, in the order of `before`; both must have answered the same rows."""
    then = {prediction.id: prediction for prediction in after}
    if set(then) != {prediction.id for prediction in before} or len(before) != len(after):
        raise ValueError(
            f"expected predictions of the same rows before and after, got {len(before)} and {len(after)} "
            f"with {len(set(then) & {p.id for p in before})} ids in common"
        )
    return [
        Flip(
            id=was.id,
            kind=_KINDS[was.right, then[was.id].right],
            before=was.answer,
            after=then[was.id].answer,
            confidence_before=was.confidence,
            confidence_after=then[was.id].confidence,
        )
        for was in before
    ]


def without(table: Sequence[Flip], ids: Collection[str]) -> list[Flip]:
    """The flips of other rows: anchors are left out so in the composition study.

    Paper: App. "Anchor Composition Across Tasks".
    """
    return [flip for flip in table if flip.id not in ids]


def retention(table: Sequence[Flip]) -> Rate:
    """Pr(correct after | correct before).

    Paper: Experimental Setting, Evaluation.
    """
    return share(flip.kind == "kept" for flip in table if flip.kind in ("kept", "lost"))


def acquisition(table: Sequence[Flip]) -> Rate:
    """Pr(correct after | incorrect before), on the rows trained on.

    Paper: Experimental Setting, Evaluation.
    """
    return share(flip.kind == "gained" for flip in table if flip.kind in ("gained", "still_wrong"))


def correction(table: Sequence[Flip], anchors: Collection[str]) -> Rate:
    """Pr(correct after | incorrect before) on rows never trained on: the anchors are left out.

    Paper: App. "Anchor Composition Across Tasks".
    """
    return acquisition(without(table, anchors))


def percent(predictions: Sequence[Prediction]) -> float:
    """Overall accuracy, 0 to 100."""
    return share(prediction.right for prediction in predictions).percent


def average_task_accuracy(accuracies: Mapping[str, float]) -> float:
    """The unweighted mean over tasks.

    Paper: Experimental Setting, Evaluation.

    >>> average_task_accuracy({"csqa": 70.0, "arc_c": 80.0})
    75.0
    """
    if not accuracies:
        raise ValueError("expected the accuracy of at least one task, got none")
    return statistics.fmean(accuracies.values())


def recovery(retained: float, sft: float, whole: float = 100.0) -> float:
    """The share of SFT's forgetting that a method undoes, in percent: 100 (R - R_SFT) / (whole - R_SFT).

    Paper: App. "Model-Scale Perspective".

    >>> recovery(80.0, 60.0)
    50.0
    """
    if not sft < whole:
        raise ValueError(f"expected an SFT that forgets something (Retention below {whole:g}), got {sft}")
    return 100 * (retained - sft) / (whole - sft)
