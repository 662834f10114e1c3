"""The loss of answers that a model gave, under that model or another one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from cplus.data.examples import Example
from cplus.interfaces import Interface
from cplus.scoring import Score, log_likelihoods


def score_answers(
    model: nn.Module,
    interface: Interface,
    examples: Sequence[Example],
    answers: Sequence[str],
    *,
    what: str = "scoring",
) -> list[Score | None]:
    """The score of each answer, and of the end of its turn, after its prompt; None for an empty answer.

    Call it for the model before and for the model after with the same answers, those of the model before.
    """
    known = [i for i, answer in enumerate(answers) if answer.strip()]
    rows = [interface.encode(interface.with_answer(examples[i], answers[i])) for i in known]
    found: list[Score | None] = [None] * len(answers)
    for i, score in zip(known, log_likelihoods(model, rows, what=what), strict=True):
        found[i] = score
    return found
