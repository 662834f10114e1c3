"""What a task is made of: multiple-choice and free-form examples, and their JSON rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cplus import files

Role: TypeAlias = Literal["system", "user", "assistant"]


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


@dataclass(frozen=True, kw_only=True)
class FreeForm:
    """A conversation so far and the response to it; only the response is ever trained on or scored."""

    id: str
    messages: tuple[Message, ...]
    response: str


Example: TypeAlias = Choice | FreeForm


def to_row(example: Example) -> dict[str, Any]:
    """The JSON row of an example: the inverse of `from_row`."""
    if isinstance(example, Choice):
        return {
            "id": example.id,
            "question": example.question,
            "choices": list(example.choices),
            "answer": example.answer,
        }
    if len(example.messages) == 1 and example.messages[0].role == "user":
        return {"id": example.id, "prompt": example.messages[0].content, "response": example.response}
    turns = [{"role": m.role, "content": m.content} for m in example.messages]
    return {"id": example.id, "messages": [*turns, {"role": "assistant", "content": example.response}]}


def lines(examples: Sequence[Example]) -> str:
    """The examples as a JSONL file that reads back to the same."""
    return "".join(files.canonical_json(to_row(example)) + "\n" for example in examples)


def fingerprint(examples: Sequence[Example]) -> str:
    """The SHA-256 of the examples' rows, in order."""
    return files.fingerprint([to_row(example) for example in examples])


def from_row(row: Mapping[str, Any], *, where: str, id: str) -> Example:
    """Read one row; `where` names it in errors, `id` serves a row that carries none.

    >>> from_row({"prompt": "Hi", "response": "Hello."}, where="a.jsonl:1", id="a-1").response
    'Hello.'
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    id = _id(row.get("id", id), where)
    keys = set(row)
    if {"question", "choices", "answer"} <= keys:
        return _choice(row, where=where, id=id)
    if {"prompt", "response"} <= keys:
        prompt, response = (_text(row[key], f"{where}: {key}") for key in ("prompt", "response"))
        return FreeForm(id=id, messages=(Message(role="user", content=prompt),), response=response)
    if "messages" in keys:
        return _conversation(row["messages"], where=where, id=id)
    raise ValueError(
        f"{where}: expected the keys question, choices, answer; or prompt, response; or messages; "
        f"found {', '.join(sorted(map(str, keys))) or 'none'}"
    )


def _id(value: object, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError(f"{where}: expected id to be a non-empty string or an integer, got {value!r:.60}")
    return _text(str(value), f"{where}: id")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: expected a non-empty string, got {value!r:.60}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{where}: expected Unicode text, got half of a surrogate pair in {value!r:.60}")
    return value


def _choice(row: Mapping[str, Any], *, where: str, id: str) -> Choice:
    question = _text(row["question"], f"{where}: question")
    choices, answer = row["choices"], row["answer"]
    if not isinstance(choices, list | tuple) or not choices:  # one choice is an open question's known answer
        raise ValueError(f"{where}: expected a list of choices, got {choices!r:.60}")
    texts = tuple(_text(choice, f"{where}: choice {i}") for i, choice in enumerate(choices))
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(texts):
        raise ValueError(f"{where}: expected answer to be an index from 0 to {len(texts) - 1}, got {answer!r}")
    return Choice(id=id, question=question, choices=texts, answer=answer)


def _conversation(messages: object, *, where: str, id: str) -> FreeForm:
    if not isinstance(messages, list | tuple) or len(messages) < 2:
        raise ValueError(f"{where}: expected messages to be a list of at least two turns, got {messages!r:.60}")
    turns = []
    for i, turn in enumerate(messages):
        if not isinstance(turn, Mapping) or turn.get("role") not in ("system", "user", "assistant"):
            raise ValueError(
                f"{where}: turn {i}: expected a role of system, user or assistant and content, got {turn!r:.80}"
            )
        turns.append(Message(role=turn["role"], content=_text(turn.get("content"), f"{where}: turn {i}")))
    if turns[-1].role != "assistant":
        raise ValueError(
            f"{where}: expected the last turn to be the assistant's answer, got a turn of {turns[-1].role}"
        )
    return FreeForm(id=id, messages=tuple(turns[:-1]), response=turns[-1].content)
