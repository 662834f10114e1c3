"""The examples of a task, multiple-choice and free-form, and their JSON rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from cplus.base import files

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A question with candidate answers, one of them right.

    >>> Choice(id="q1", question="Is ice cold?", choices=("yes", "no"), answer=0).right
    'yes'
    """

    id: str
    question: str
    choices: tuple[str, ...]
    answer: int

    @property
    def right(self) -> str:
        """The text of the right choice."""
        return self.choices[self.answer]


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str
    calls: str = ""
    """The tool calls of an assistant turn: a JSON list, arguments as JSON text, as in OpenAI's rows."""
    call_id: str = ""
    """The tool call that a tool turn answers."""
    name: str = ""
    """The tool that a tool turn comes from."""
    trained: bool = True
    """Whether an assistant turn may be a target; OpenAI's rows write `"weight": 0` where it may not."""


@dataclass(frozen=True, kw_only=True)
class FreeForm:
    """A conversation and the response to it; without messages, the response is plain text to continue training on.

    An empty response without calls is a request that has not been answered yet.
    """

    id: str
    messages: tuple[Message, ...]
    response: str
    calls: str = ""
    """The tool calls of the response."""
    tools: str = ""
    """The tools the model may call: a JSON list of schemas for the chat template."""
    cut: bool = False
    """Whether the response was cut off at a limit, so that its end is not known and not learned."""

    @property
    def answered(self) -> bool:
        """Whether there is a response."""
        return bool(self.response or self.calls)

    @property
    def is_text(self) -> bool:
        """Whether this is plain text and no conversation."""
        return not self.messages

    @property
    def turns(self) -> tuple[Message, ...]:
        """The messages with the response, if there is one, as the last turn."""
        if not self.answered:
            return self.messages
        return (*self.messages, Message(role="assistant", content=self.response, calls=self.calls))


Example: TypeAlias = Choice | FreeForm


def to_row(example: Example) -> dict[str, Any]:
    """The JSON row of an example: the inverse of `formats.from_row`."""
    if isinstance(example, Choice):
        return {**asdict(example), "choices": list(example.choices)}
    if example.is_text:
        return {"id": example.id, "text": example.response}
    row: dict[str, Any] = {"id": example.id}
    asked = Message(role="user", content=example.messages[0].content)
    if example.messages == (asked,) and not (example.calls or example.tools):
        row["prompt"] = asked.content
        if example.answered:
            row["response"] = example.response
    else:
        row["messages"] = [turn_row(turn) for turn in example.turns]
        if example.tools:
            row["tools"] = example.tools
    return row | ({"cut": True} if example.cut else {})


def turn_row(turn: Message) -> dict[str, Any]:
    """A turn as OpenAI's rows write it."""
    calls = json.loads(turn.calls) if turn.calls else None
    given = {"tool_calls": calls, "tool_call_id": turn.call_id, "name": turn.name}
    row = {"role": turn.role, "content": turn.content, **{key: value for key, value in given.items() if value}}
    return row if turn.trained else {**row, "weight": 0}


def lines(examples: Sequence[Example]) -> str:
    """The examples as a JSONL file that reads back to the same."""
    return "".join(files.canonical_json(to_row(example)) + "\n" for example in examples)


def fingerprint(examples: Sequence[Example]) -> str:
    """The SHA-256 of the examples' rows, in order."""
    return files.fingerprint([to_row(example) for example in examples])


# What a model answered, example by example: plain values that reports read without torch.


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
        """`correct`, which the answer must have been judged for."""
        if self.correct is None:
            raise ValueError(f"prediction {self.id} was never judged; score it by exact match or a validator first")
        return self.correct


def prediction_from_row(row: Mapping[str, Any]) -> Prediction:
    """Read what `dataclasses.asdict` and JSON have made of a prediction."""
    return Prediction(**{**row, "scores": tuple(row["scores"]), "num_tokens": tuple(row["num_tokens"])})


BUILT_IN: dict[str, Callable[[], Sequence[Example]]] = {}
"""Tasks that come with a package, which registers their rows here; `cplus.data.tasks` finds them by name."""
