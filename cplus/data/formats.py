"""The formats of rows that people have: how each is recognised, and how a row of it becomes an example."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from cplus.data.examples import Choice, Example, FreeForm, Message, Role

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """A format of rows, recognised by its keys alone."""

    name: str
    keys: tuple[str, ...]
    optional: tuple[str, ...] = ()
    request: tuple[str, ...] = ()
    """The keys of a row without its response; such rows are read only where the caller admits them."""
    turns: Callable[[Row, str], list[Message]] | None = None
    """The conversation of a row, given where it is; None for multiple choice and plain text."""
    note: str = ""


def from_row(row: Row, *, where: str, id: str, requests: bool = False) -> Example:
    """The example that a row holds; `where` names it in errors, `id` serves a row that carries none.

    `requests` admits rows without a response.

    >>> from_row({"prompt": "Hi", "response": "Hello."}, where="a.jsonl:1", id="a-1").response
    'Hello.'
    """
    kind = recognise(row, where=where, requests=requests)
    id = row.get("id", id)
    if isinstance(id, bool) or not isinstance(id, str | int) or not str(id).strip():
        raise ValueError(f"{where}: expected id to be a non-empty string or an integer, got {id!r:.60}")
    id = text(str(id), f"{where}: id")
    if kind.name == "choice":
        return _choice(row, where, id)
    if kind.turns is None:
        return FreeForm(id=id, messages=(), response=text(row["text"], f"{where}: text"))
    turns = kind.turns(row, where)
    *before, last = turns
    tools = _schemas(row.get("tools"), where) if "tools" in kind.optional else ""
    if last.role == "assistant" and before:
        if not last.trained:
            raise ValueError(f"{where}: the last turn has a weight of 0, so nothing follows to be learned; remove it")
        cut = row.get("cut") is True
        return FreeForm(id=id, messages=tuple(before), response=last.content, calls=last.calls, tools=tools, cut=cut)
    if requests and last.role in ("user", "tool"):
        return FreeForm(id=id, messages=tuple(turns), response="", tools=tools)
    raise ValueError(
        f"{where}: expected the last turn to be the assistant's answer to another, got {len(turns)} turns that end "
        f"with one of {last.role}"
    )


def recognise(row: object, *, where: str, requests: bool = False) -> Format:
    """The first format of the table whose keys a row has."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    found = [one for one in FORMATS if row.keys() >= set(one.keys)]
    found = found or [one for one in FORMATS if requests and one.request and row.keys() >= set(one.request)]
    if not found:
        expected = "; or ".join(", ".join(one.keys) for one in FORMATS)
        named = ", ".join(sorted(map(str, row))) or "none"
        raise ValueError(f"{where}: expected the keys {expected}; found {named}; map others with columns")
    strange = [key for key in _CHANGES_MEANING if row.get(key) not in (None, "", [])]
    if strange and found[0] not in OWN:
        raise ValueError(
            f"{where}: {found[0].name} rows are read without {strange[0]!r}, and this row has it; remove that key, "
            "or write the row as messages"
        )
    return found[0]


def text(value: object, where: str) -> str:
    """The value, if it is Unicode text and not blank."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: expected a non-empty string, got {value!r:.60}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{where}: expected Unicode text, got half of a surrogate pair in {value!r:.60}")
    return value


def _choice(row: Row, where: str, id: str) -> Choice:
    question = text(row["question"], f"{where}: question")
    choices, answer = row["choices"], row["answer"]
    if not isinstance(choices, list | tuple) or not choices:  # one choice is an open question's known answer
        raise ValueError(f"{where}: expected a list of choices, got {choices!r:.60}")
    texts = tuple(text(choice, f"{where}: choice {i}") for i, choice in enumerate(choices))
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(texts):
        raise ValueError(f"{where}: expected answer to be an index from 0 to {len(texts) - 1}, got {answer!r}")
    return Choice(id=id, question=question, choices=texts, answer=answer)


# The turns of a row, format by format.


def _prompted(row: Row, where: str) -> list[Message]:
    """Texts or lists of messages; of the latter, only the answer's are learned."""
    turns = _untrained(_turns(row["prompt"], "user", f"{where}: prompt"))
    return turns + _answer(row, "response" if "response" in row else "completion", where)


def _alpaca(row: Row, where: str) -> list[Message]:
    """Instruction and input are one user turn, with an empty line between them."""
    asked = text(row["instruction"], f"{where}: instruction")
    if row.get("input") not in (None, ""):
        asked = f"{asked}\n\n{text(row['input'], f'{where}: input')}"
    return [*_system(row, where), Message(role="user", content=asked), *_answer(row, "output", where)]


_SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool", "observation": "tool"}


def _sharegpt(row: Row, where: str) -> list[Message]:
    given = _listed(row["conversations"], where)
    return _system(row, where) + _messages([_said(turn, f"{where}: turn {i}") for i, turn in enumerate(given)], where)


def _said(turn: object, where: str) -> Row:
    """A turn of ShareGPT as one of OpenAI's."""
    speaker, value = (turn.get("from"), turn.get("value")) if isinstance(turn, Mapping) else (None, None)
    if speaker == "function_call":
        called = parsed(text(value, where), f"{where}: function_call")
        return {
            "role": "assistant",
            "tool_calls": [{"function": call} for call in (called if isinstance(called, list) else [called])],
        }
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise ValueError(
            f"{where}: expected from to be {', '.join(_SPEAKERS)} or function_call, and a value, got {turn!r:.80}"
        )
    return {"role": _SPEAKERS[speaker], "content": value}


def _preferred(row: Row, where: str) -> list[Message]:
    """The chosen answer; where chosen is the whole conversation, its last turn is the answer."""
    chosen = _turns(row["chosen"], "assistant", f"{where}: chosen")
    if any(turn.role == "user" for turn in chosen):
        return [*_untrained(chosen[:-1]), chosen[-1]]
    return _untrained(_turns(row.get("prompt"), "user", f"{where}: prompt")) + chosen


def _system(row: Row, where: str) -> list[Message]:
    given = row.get("system")
    return [] if given in (None, "") else _turns(given, "system", f"{where}: system")


def _answer(row: Row, key: str, where: str) -> list[Message]:
    return [] if row.get(key) is None else _turns(row[key], "assistant", f"{where}: {key}")


def _turns(value: object, role: Role, where: str) -> list[Message]:
    """Messages, or a text as one turn of that role."""
    if isinstance(value, list | tuple):
        return _messages(value, where)
    return [Message(role=role, content=text(value, where))]


def _untrained(turns: Sequence[Message]) -> list[Message]:
    return [replace(turn, trained=False) if turn.role == "assistant" else turn for turn in turns]


def _messages(turns: object, where: str) -> list[Message]:
    return [_turn(turn, f"{where}: turn {i}") for i, turn in enumerate(_listed(turns, where))]


def _listed(turns: object, where: str) -> Sequence[object]:
    if not isinstance(turns, list | tuple) or not turns:
        raise ValueError(f"{where}: expected a list of turns, got {turns!r:.60}")
    return turns


def _turn(turn: object, where: str) -> Message:
    roles = ("system", "user", "assistant", "tool")
    if not isinstance(turn, Mapping) or turn.get("role") not in roles:
        raise ValueError(f"{where}: expected a role of {', '.join(roles)} and content, got {turn!r:.80}")
    role, content = turn["role"], turn.get("content")
    if role == "assistant":
        if turn.get("function_call") is not None:
            raise ValueError(f"{where}: function_call is not read; write it as tool_calls")
        if (weight := turn.get("weight")) not in (None, 0, 1):
            raise ValueError(f"{where}: expected a weight of 0 or 1, got {weight!r:.60}")
        calls = _calls(turn.get("tool_calls"), where)
        # A turn that only calls tools has no words.
        content = "" if calls and content in (None, "") else text(content, where)
        return Message(role=role, content=content, calls=calls, trained=weight != 0)
    told = {
        key: text(turn[key], f"{where}: {key}")
        for key in ("tool_call_id", "name")
        if role == "tool" and turn.get(key) is not None
    }
    return Message(
        role=role, content=text(content, where), call_id=told.get("tool_call_id", ""), name=told.get("name", "")
    )


def _calls(value: object, where: str) -> str:
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
        own = {"name": name, "arguments": _dumped(given, f"{here}: arguments")}
        known = {} if call.get("id") is None else {"id": text(call["id"], f"{here}: id")}
        calls.append({**known, "type": "function", "function": own})
    return _dumped(calls, where)


def _schemas(value: object, where: str) -> str:
    """The tools a row offers, as one JSON text: a list of schemas, given as such or as JSON text."""
    given = parsed(value, f"{where}: tools") if isinstance(value, str) and value else value
    if given in (None, "", [], ()):
        return ""
    if not isinstance(given, list | tuple):
        raise ValueError(f"{where}: expected tools to be a list of schemas, got {value!r:.60}")
    for i, tool in enumerate(given):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        text(function.get("name") if isinstance(function, Mapping) else None, f"{where}: tool {i}: name")
    return _dumped(given, f"{where}: tools")


def parsed(value: str, where: str) -> Any:
    """The value of a JSON text in which no object has a name twice."""
    try:
        return json.loads(value, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected JSON, but it does not parse: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        check_once(name for name, _ in pairs)
    return found


def check_once(names: Iterable[str], where: str = "") -> None:
    """Refuse a name that is there twice: of its values all but one would be dropped in silence."""
    [(name, times)] = Counter(names).most_common(1) or [("", 1)]
    if times > 1:
        raise ValueError(f"{where}expected each name once, got {name!r} {times} times")


def _dumped(value: object, where: str) -> str:
    """JSON in the order of keys as given: chat templates write it so."""
    try:
        dumped = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected JSON values, got {value!r:.60}") from error
    return text(dumped, where)


_CHOSEN = "the chosen answers are learned, the rejected ones are not used"
_WHOLE = "plain text without a chat template, learned from its first token on"
FORMATS: tuple[Format, ...] = (
    Format("choice", ("question", "choices", "answer")),
    Format("prompt-response", ("prompt", "response"), ("tools", "cut"), ("prompt",), _prompted),
    Format("messages", ("messages",), ("tools", "cut"), (), lambda row, where: _messages(row["messages"], where)),
    Format("alpaca", ("instruction", "output"), ("input", "system"), ("instruction",), _alpaca),
    Format("sharegpt", ("conversations",), ("system", "tools"), (), _sharegpt),
    Format("prompt-completion", ("prompt", "completion"), ("tools",), (), _prompted),
    Format("preference", ("chosen", "rejected"), ("prompt", "tools"), (), _preferred, _CHOSEN),
    Format("text", ("text",), note=_WHOLE),
)
"""The first three are this project's own; a row with the keys of several formats is of the first of them."""
OWN = FORMATS[:3]
MIXED = FORMATS[1:3]
"""Formats whose rows one file may mix."""
FIELDS = tuple(dict.fromkeys(["id", *(key for one in FORMATS for key in (*one.keys, *one.optional))]))
"""Every name that a column can be mapped to."""
_CHANGES_MEANING = ("history", "images", "videos", "audios", "image", "video", "audio", "label")
