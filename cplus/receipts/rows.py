"""From two models' answers to the rows of a receipt, in words a person can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from cplus.data.examples import Choice, Example
from cplus.data.predictions import Prediction
from cplus.evaluation.retention_acquisition import Kind, flips
from cplus.receipts.contents import RowComparison


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The mean loss per token of one text under the model before and the model after, and its number of tokens."""

    before: float
    after: float
    tokens: int


def rows(
    examples: Sequence[Example],
    before: Sequence[Prediction],
    after: Sequence[Prediction],
    *,
    interface: str,
    losses: Sequence[Losses] = (),
    answers: Sequence[Losses | None] = (),
) -> tuple[RowComparison, ...]:
    """The comparisons of these examples in their order.

    Free-form rows add `losses`, one per example, of the given responses, and `answers`, one per example, of the answers
    that the model before gave (None for an empty answer).
    """
    judged = all(prediction.correct is not None for prediction in (*before, *after))
    kinds: dict[str, Kind] = {flip.id: flip.kind for flip in flips(before, after)} if judged else {}
    was, now = ({prediction.id: prediction for prediction in some} for some in (before, after))
    known: Sequence[Losses | None] = losses or [None] * len(examples)
    own = answers or [None] * len(examples)
    return tuple(
        _row(example, kinds.get(example.id), was[example.id], now[example.id], interface, loss, answer)
        for example, loss, answer in zip(examples, known, own, strict=True)
    )


def _row(
    example: Example,
    kind: Kind | None,
    was: Prediction,
    now: Prediction,
    interface: str,
    loss: Losses | None,
    answer: Losses | None,
) -> RowComparison:
    gold = _answer(example, example.answer, interface) if isinstance(example, Choice) else example.response
    return RowComparison(
        id=example.id,
        kind=kind,
        input=_input(example, interface),
        gold=gold,
        before=_answer(example, was.answer, interface),
        after=_answer(example, now.answer, interface),
        confidence_before=min(was.confidence, 1.0),  # the exponential of a rounded 0 may be an ulp above 1
        confidence_after=min(now.confidence, 1.0),
        # Elsewhere the model never sees a letter, so the position of the right choice means nothing.
        label=ascii_uppercase[example.answer] if isinstance(example, Choice) and interface == "letter" else None,
        tokens=loss.tokens if loss else None,
        nll_before=loss.before if loss else None,
        nll_after=loss.after if loss else None,
        answer_nll_before=answer.before if answer else None,
        answer_nll_after=answer.after if answer else None,
    )


def _input(example: Example, interface: str) -> str:
    """The model's input, with the options it could choose from."""
    if isinstance(example, Choice):
        options = range(len(example.choices)) if len(example.choices) > 1 else ()
        return "\n".join([example.question, *(f"  {_answer(example, option, interface)}" for option in options)])
    if len(example.messages) == 1:
        return example.messages[0].content
    return "\n".join(f"{message.role}: {message.content}" for message in example.messages)


def _answer(example: Example, answer: int | str, interface: str) -> str:
    """An answer in words; an option has its letter before it where the interface asks for letters."""
    if isinstance(answer, str) or not isinstance(example, Choice):
        return str(answer)
    text = example.choices[answer]
    return f"{ascii_uppercase[answer]}: {text}" if interface == "letter" else text
