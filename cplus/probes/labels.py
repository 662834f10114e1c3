"""The frozen model's own answers to its probes and to a user's requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import nn

from cplus.base import files
from cplus.base.files import cache_folder
from cplus.data.examples import Example, FreeForm, fingerprint, to_row
from cplus.data.formats import from_row
from cplus.data.interfaces import Interface, Rejected
from cplus.models import Loaded
from cplus.models.decoding import LocalEngine
from cplus.models.scoring import log_likelihoods, predict

# The frozen model's own answers, by the fixed rule of the interface.


MAX_ANSWER_TOKENS = {"letter": 1, "cloze": 48, "freeform": 256}
"""Maximum length of a free-text answer, by interface."""


@dataclass(frozen=True, slots=True)
class Label:
    """An example with the frozen model's answer as its target, and the model's confidence in it."""

    example: Example
    confidence: float


Labeller: TypeAlias = Callable[[Sequence[Example]], list[Label | Rejected]]


def label(
    model: nn.Module,
    interface: Interface,
    examples: Sequence[Example],
    *,
    max_tokens: int | None = None,
    cut: bool = False,
) -> list[Label | Rejected]:
    """The most likely candidate if there are candidates, otherwise greedily decoded text.

    Paper: y_j = h_theta0(x_j) in App. C.1. Confidence is the softmax over the candidates, or the geometric mean
    probability of the text's tokens. `max_tokens` replaces the interface's limit on the length of a text; `cut` keeps
    an answer that reaches it. A plain text is its own answer.
    """
    texts = [i for i, example in enumerate(examples) if isinstance(example, FreeForm) and example.is_text]
    closed = [i for i, example in enumerate(examples) if interface.candidates(example)]
    asked = [i for i in range(len(examples)) if i not in {*texts, *closed}]
    labels: dict[int, Label | Rejected] = {}
    chosen = predict(model, interface, [examples[i] for i in closed], what="labelling")
    for i, found in zip(closed, chosen, strict=True):
        labels[i] = Label(interface.with_answer(examples[i], found.answer), found.confidence)
    own = log_likelihoods(model, [interface.encode(examples[i]) for i in texts], what="scoring")
    for i, score in zip(texts, own, strict=True):
        labels[i] = Label(examples[i], math.exp(score.mean))
    prompts, limit = [interface.prompt(examples[i]) for i in asked], max_tokens or MAX_ANSWER_TOKENS[interface.name]
    engine = LocalEngine(model, interface.tokenizer)
    for i, row in zip(asked, engine.greedy(prompts, max_new_tokens=limit, stop=interface.answer_stop), strict=True):
        text, limited = row.text, row.end == "limit"
        for mark in interface.answer_stop:
            text = text.removesuffix(mark)
        text = text.strip()
        if limited and not cut:
            labels[i] = Rejected("answer without end")
        elif not any(character.isalnum() for character in text):
            labels[i] = Rejected("empty answer")
        elif text.endswith(":") and not limited:
            labels[i] = Rejected("answer breaks off")
        else:
            answered = interface.with_answer(examples[i], text)
            if limited and isinstance(answered, FreeForm):
                answered = replace(answered, cut=True)
            labels[i] = Label(answered, math.exp(row.total / len(row.tokens)))
    return [labels[i] for i in range(len(examples))]


# The base model's own answers, for users who have requests to preserve but no recorded answers.


LONGER = 4
"""How many times the usual limit an own answer may have, if the model's window admits it."""


def own_answers(base: Loaded, interface: Interface, examples: Sequence[Example], *, name: str) -> tuple[Example, ...]:
    """The rows with the base model's greedy answers as responses, cached on disk; errors call the rows `name`.

    A row whose answer reaches the token limit is omitted: its end is not known.
    """
    # The tokens of the first prompt identify the prompt format, chat or plain text.
    prompt = list(interface.prompt(examples[0]))
    key = files.fingerprint([base.fingerprint, interface.name, prompt, fingerprint(examples)])
    path = cache_folder() / "answers" / f"own-{key[:24]}.json"
    if not path.is_file():
        longest = max(len(interface.prompt(example)) for example in examples)
        limit = min(LONGER * MAX_ANSWER_TOKENS[interface.name], base.window - longest)
        labels = label(base.model, interface, examples, max_tokens=limit)
        files.write_json(path, [to_row(own.example) if isinstance(own, Label) else None for own in labels])
    rows = [row for row in files.read_json(path) if row is not None]
    if not rows:
        raise ValueError(
            f"none of the {len(examples)} {name} rows was answered before the token limit; supply other rows"
        )
    return tuple(from_row(row, where=f"{path}: {row['id']}", id=row["id"]) for row in rows)
