"""From two models' answers to the rows of a receipt, in words a person can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from cplus.data.examples import Choice, Example
from cplus.data.predictions import Prediction
from cplus.evaluation.outcomes import Kind, flips
from cplus.receipts.contents import Row


@dataclass(frozen=True, kw_only=True)
class Losses:
    """A given response's mean loss a token, before and after, and its number of tokens."""

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
) -> tuple[Row, ...]:
    """The flips of these examples in their order; `losses`, one an example, are what free-form responses add."""
    judged = all(prediction.correct is not None for prediction in (*before, *after))
    kinds: dict[str, Kind] = {flip.id: flip.kind for flip in flips(before, after)} if judged else {}
    was, now = ({prediction.id: prediction for prediction in some} for some in (before, after))
    known: Sequence[Losses | None] = losses or [None] * len(examples)
    return tuple(
        _row(example, kinds.get(example.id), was[example.id], now[example.id], interface, loss)
        for example, loss in zip(examples, known, strict=True)
    )


def _row(
    example: Example, kind: Kind | None, was: Prediction, now: Prediction, interface: str, loss: Losses | None
) -> Row:
    letter = ascii_uppercase[example.answer] if isinstance(example, Choice) else None
    gold = _said(example, example.answer, interface) if isinstance(example, Choice) else example.response
    return Row(
        id=example.id,
        kind=kind,
        input=_asked(example, interface),
        gold=gold,
        before=_said(example, was.answer, interface),
        after=_said(example, now.answer, interface),
        confidence_before=min(was.confidence, 1.0),  # the exponential of a rounded 0 may lie an ulp above 1
        confidence_after=min(now.confidence, 1.0),
        # Elsewhere the model never sees a letter, so the place of the right choice says nothing.
        label=letter if interface == "letter" else None,
        tokens=loss.tokens if loss else None,
        nll_before=loss.before if loss else None,
        nll_after=loss.after if loss else None,
    )


def _asked(example: Example, interface: str) -> str:
    """What the model was asked, with the options it could choose from."""
    if isinstance(example, Choice):
        options = range(len(example.choices)) if len(example.choices) > 1 else ()
        return "\n".join([example.question, *(f"  {_said(example, option, interface)}" for option in options)])
    if len(example.messages) == 1:
        return example.messages[0].content
    return "\n".join(f"{message.role}: {message.content}" for message in example.messages)


def _said(example: Example, answer: int | str, interface: str) -> str:
    """An answer in words; its letter stands before an option where letters are what is asked for."""
    if isinstance(answer, str) or not isinstance(example, Choice):
        return str(answer)
    text = example.choices[answer]
    return f"{ascii_uppercase[answer]}: {text}" if interface == "letter" else text
