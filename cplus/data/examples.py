"""The examples of a task, multiple-choice and free-form, and their JSON rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NoReturn, TypeAlias

from cplus.base import files

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


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
    """The JSON row of an example: the inverse of `from_row`."""
    if isinstance(example, Choice):
        return {**asdict(example), "choices": list(example.choices)}
    if example.is_text:
        return {"id": example.id, "text": example.response}
    cut = {"cut": True} if example.cut else {}
    asked = Message(role="user", content=example.messages[0].content)
    if example.messages == (asked,) and not (example.calls or example.tools):
        answer = {"response": example.response} if example.answered else {}
        return {"id": example.id, "prompt": asked.content, **answer, **cut}
    tools = {"tools": example.tools} if example.tools else {}
    return {"id": example.id, "messages": [_turn_row(turn) for turn in example.turns], **tools, **cut}


def _turn_row(turn: Message) -> dict[str, Any]:
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


def from_row(row: Mapping[str, Any], *, where: str, id: str, requests: bool = False) -> Example:
    """Read one row of this project's own; `where` names it in errors, `id` serves a row that carries none.

    `requests` admits rows without a response.

    >>> from_row({"prompt": "Hi", "response": "Hello."}, where="a.jsonl:1", id="a-1").response
    'Hello.'
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    id = id_of(row, where=where, id=id)
    keys = set(row)
    if {"question", "choices", "answer"} <= keys:
        return choice(row, where=where, id=id)
    if {"prompt", "response"} <= keys or ("prompt" in keys and requests and "messages" not in keys):
        asked, response = text(row["prompt"], f"{where}: prompt"), row.get("response")
        said = "" if requests and response is None else text(response, f"{where}: response")
        turns = (Message(role="user", content=asked),)
        return _marked(FreeForm(id=id, messages=turns, response=said), row, where)
    if "messages" in keys:
        given = messages(row["messages"], where=where, requests=requests)
        return _marked(conversation(given, tools=row.get("tools"), where=where, id=id, requests=requests), row, where)
    if "text" in keys:
        return FreeForm(id=id, messages=(), response=text(row["text"], f"{where}: text"))
    raise ValueError(
        f"{where}: expected the keys question, choices, answer; or prompt, response; or messages; or text; "
        f"found {', '.join(sorted(map(str, keys))) or 'none'}"
    )


def _marked(example: FreeForm, row: Mapping[str, Any], where: str) -> FreeForm:
    cut = row.get("cut")
    if cut not in (None, True, False):
        raise ValueError(f"{where}: expected cut to be true or false, got {cut!r:.60}")
    return replace(example, cut=True) if cut else example


def id_of(row: Mapping[str, Any], *, where: str, id: str) -> str:
    """The row's id, or the given one if it carries none."""
    value = row.get("id", id)
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError(f"{where}: expected id to be a non-empty string or an integer, got {value!r:.60}")
    return text(str(value), f"{where}: id")


def text(value: object, where: str) -> str:
    """The value, if it is Unicode text and not blank."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: expected a non-empty string, got {value!r:.60}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{where}: expected Unicode text, got half of a surrogate pair in {value!r:.60}")
    return value


def choice(row: Mapping[str, Any], *, where: str, id: str) -> Choice:
    """A multiple-choice row."""
    question = text(row["question"], f"{where}: question")
    choices, answer = row["choices"], row["answer"]
    if not isinstance(choices, list | tuple) or not choices:  # one choice is an open question's known answer
        raise ValueError(f"{where}: expected a list of choices, got {choices!r:.60}")
    texts = tuple(text(choice, f"{where}: choice {i}") for i, choice in enumerate(choices))
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(texts):
        raise ValueError(f"{where}: expected answer to be an index from 0 to {len(texts) - 1}, got {answer!r}")
    return Choice(id=id, question=question, choices=texts, answer=answer)


def messages(turns: object, *, where: str, requests: bool = False) -> list[Message]:
    """The turns of an OpenAI `messages` list."""
    least, expected = (1, "a list of turns") if requests else (2, "a list of at least two turns")
    if not isinstance(turns, list | tuple) or len(turns) < least:
        raise ValueError(f"{where}: expected messages to be {expected}, got {turns!r:.60}")
    return [_turn(turn, f"{where}: turn {i}") for i, turn in enumerate(turns)]


def _turn(turn: object, where: str) -> Message:
    if not isinstance(turn, Mapping) or turn.get("role") not in ROLES:
        raise ValueError(f"{where}: expected a role of system, user, assistant or tool and content, got {turn!r:.80}")
    role: Role = turn["role"]
    if role == "assistant":
        if turn.get("function_call") is not None:
            raise ValueError(f"{where}: function_call is not read; write it as tool_calls")
        weight = turn.get("weight")
        if weight not in (None, 0, 1):
            raise ValueError(f"{where}: expected a weight of 0 or 1, got {weight!r:.60}")
        calls = tool_calls(turn.get("tool_calls"), where)
        # A turn that only calls tools has no words.
        content = "" if calls and turn.get("content") in (None, "") else text(turn.get("content"), where)
        return Message(role=role, content=content, calls=calls, trained=weight != 0)
    content = text(turn.get("content"), where)
    if role != "tool":
        return Message(role=role, content=content)
    call_id, name = (turn.get(key) for key in ("tool_call_id", "name"))
    return Message(
        role=role,
        content=content,
        call_id="" if call_id is None else text(call_id, f"{where}: tool_call_id"),
        name="" if name is None else text(name, f"{where}: name"),
    )


def conversation(
    turns: Sequence[Message], *, where: str, id: str, tools: object = None, requests: bool = False
) -> FreeForm:
    """A conversation that ends with the assistant's answer, or, where requests are admitted, with a request."""
    last = turns[-1]
    offered = tool_schemas(tools, where)
    if last.role != "assistant":
        if requests and last.role in ("user", "tool"):
            return FreeForm(id=id, messages=tuple(turns), response="", tools=offered)
        raise ValueError(f"{where}: expected the last turn to be the assistant's answer, got a turn of {last.role}")
    if not last.trained:
        raise ValueError(f"{where}: the last turn has a weight of 0, so nothing follows to be learned; remove it")
    return FreeForm(id=id, messages=tuple(turns[:-1]), response=last.content, calls=last.calls, tools=offered)


def tool_calls(value: object, where: str) -> str:
    """Tool calls as one JSON text, their arguments as JSON texts; what is not JSON is refused."""
    if value in (None, [], ()):
        return ""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: expected tool_calls to be a list, got {value!r:.60}")
    calls = []
    for i, call in enumerate(value):
        here = f"{where}: tool call {i}"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError(
                f'{here}: expected {{"type": "function", "function": {{"name", "arguments"}}}}, got {call!r:.80}'
            )
        name, arguments = text(function.get("name"), f"{here}: name"), function.get("arguments")
        given = parsed(arguments, f"{here}: arguments") if isinstance(arguments, str) else arguments
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{here}: expected arguments to be a JSON object, got {arguments!r:.60}; "
                "write {} for a call without arguments"
            )
        known = {} if call.get("id") is None else {"id": text(call["id"], f"{here}: id")}
        calls.append(
            {**known, "type": "function", "function": {"name": name, "arguments": _dumped(given, f"{here}: arguments")}}
        )
    return _dumped(calls, where)


def tool_schemas(value: object, where: str) -> str:
    """The tools a row offers, as one JSON text: a list of schemas, given as such or as JSON text."""
    if value in (None, "", [], ()):
        return ""
    given = parsed(value, f"{where}: tools") if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise ValueError(f"{where}: expected tools to be a list of schemas, got {value!r:.60}")
    for i, tool in enumerate(given):
        text(tool_name(tool), f"{where}: tool {i}: name")
    return _dumped(given, f"{where}: tools") if given else ""


def tool_name(tool: object) -> object:
    """The name in a tool's schema, inside `function` or at its top level."""
    if not isinstance(tool, Mapping):
        return None
    function = tool.get("function", tool)
    return function.get("name") if isinstance(function, Mapping) else None


def parsed(value: str, where: str) -> Any:
    """The value of a JSON text."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(value, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected JSON, but it does not parse: {error}") from error


def _dumped(value: object, where: str) -> str:
    """JSON in the order of keys as given: chat templates write it so."""
    try:
        dumped = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected JSON values, got {value!r:.60}") from error
    return text(dumped, where)


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
        """`correct`, where it must be known."""
        if self.correct is None:
            raise ValueError(f"prediction {self.id} was never judged; score it by exact match or a validator first")
        return self.correct


def prediction_to_row(prediction: Prediction) -> dict[str, Any]:
    """The JSON row of a prediction."""
    return {**asdict(prediction), "scores": list(prediction.scores), "num_tokens": list(prediction.num_tokens)}


def prediction_from_row(row: Mapping[str, Any]) -> Prediction:
    """Read a row written by `to_row`.

    >>> p = Prediction(id="a", answer=1, correct=True, confidence=0.5, scores=(-2.0, -1.0), num_tokens=(1, 1))
    >>> prediction_from_row(prediction_to_row(p)) == p
    True
    """
    return Prediction(**{**row, "scores": tuple(row["scores"]), "num_tokens": tuple(row["num_tokens"])})


BUILT_IN: dict[str, Callable[[], Sequence[Example]]] = {}
"""Tasks that come with a package, which registers their rows here; `cplus.data.tasks` finds them by name."""
