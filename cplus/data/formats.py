"""The formats of rows that people have: how each is recognised, and how a row of it becomes an example."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from cplus.data import examples
from cplus.data.examples import Example, FreeForm, Message, Role

Row: TypeAlias = Mapping[str, Any]
Reader: TypeAlias = Callable[[Row, str, str, bool], Example]
"""Reads a row, given where it is, its id and whether it may lack a response."""


@dataclass(frozen=True)
class Format:
    """A format of rows, recognised by its keys alone."""

    name: str
    keys: tuple[str, ...]
    optional: tuple[str, ...]
    read: Reader
    family: str
    """Formats of one family may be mixed in one file."""
    alone: bool = False
    """Whether a row may have no further key, except an id."""
    request: bool = False
    """Whether its rows lack a response, so that they are read only where the caller admits that."""
    note: str = ""

    @property
    def known(self) -> tuple[str, ...]:
        """Every key that is read."""
        return (*self.keys, *self.optional)

    def fits(self, keys: set[str]) -> bool:
        """Whether a row with these keys is of this format."""
        return set(self.keys) <= keys and (not self.alone or keys <= {*self.known, "id"})


@dataclass(frozen=True, kw_only=True)
class Detected:
    """What a file or a data set was found to hold."""

    format: str
    keys: tuple[str, ...]
    rows: int
    requests: int = 0
    """The number of rows without a response."""
    unused: tuple[str, ...] = ()
    """Keys that are not read."""
    note: str = ""

    @property
    def sentence(self) -> str:
        """One line for the terminal and the record.

        >>> Detected(format="alpaca", keys=("instruction", "output"), rows=40, unused=("source",)).sentence
        'alpaca rows: instruction, output; 40 read; not used: source'
        """
        lacking = f"{self.requests} without a response" if self.requests else ""
        unused = f"not used: {', '.join(self.unused)}" if self.unused else ""
        parts = (f"{self.format} rows: {', '.join(self.keys)}", f"{self.rows} read", lacking, unused, self.note)
        return "; ".join(filter(None, parts))

    def __str__(self) -> str:
        return self.sentence


def _own(row: Row, where: str, id: str, requests: bool) -> Example:
    return examples.from_row(row, where=where, id=id, requests=requests)


def _alpaca(row: Row, where: str, id: str, requests: bool) -> FreeForm:
    """Instruction and input are one user turn, with an empty line between them."""
    asked = examples.text(row["instruction"], f"{where}: instruction")
    if row.get("input") not in (None, ""):
        asked = f"{asked}\n\n{examples.text(row['input'], f'{where}: input')}"
    turns = [*_system(row, where), Message(role="user", content=asked)]
    if "output" in row or not requests:
        turns.append(Message(role="assistant", content=examples.text(row.get("output"), f"{where}: output")))
    return examples.conversation(turns, where=where, id=id, requests=requests)


def _system(row: Row, where: str) -> list[Message]:
    given = row.get("system")
    return [] if given in (None, "") else [Message(role="system", content=examples.text(given, f"{where}: system"))]


_SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool", "observation": "tool"}


def _sharegpt(row: Row, where: str, id: str, requests: bool) -> FreeForm:
    given = row["conversations"]
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(f"{where}: expected conversations to be a list of turns, got {given!r:.60}")
    said = [_said(turn, f"{where}: turn {i}") for i, turn in enumerate(given)]
    system = _system(row, where)
    if system and said[0].role == "system":
        raise ValueError(f"{where}: the system message is given twice, as a key and as a turn; remove one")
    turns = [*system, *said]
    if len(turns) < 2 and not requests:
        raise ValueError(f"{where}: expected conversations of at least two turns, got {given!r:.60}")
    return examples.conversation(turns, tools=row.get("tools"), where=where, id=id, requests=requests)


def _said(turn: object, where: str) -> Message:
    speaker = turn.get("from") if isinstance(turn, Mapping) else None
    if not isinstance(turn, Mapping) or not isinstance(speaker, str) or speaker not in (*_SPEAKERS, "function_call"):
        raise ValueError(
            f"{where}: expected from to be {', '.join(_SPEAKERS)} or function_call, and a value, got {turn!r:.80}"
        )
    value = examples.text(turn.get("value"), where)
    if speaker != "function_call":
        return Message(role=_SPEAKERS[speaker], content=value)  # type: ignore[arg-type]
    called = examples.parsed(value, f"{where}: function_call")
    calls = [{"function": call} for call in (called if isinstance(called, list) else [called])]
    if not calls:
        raise ValueError(f'{where}: expected a function_call of {{"name", "arguments"}}, got {value!r:.60}')
    return Message(role="assistant", content="", calls=examples.tool_calls(calls, where))


def _completion(row: Row, where: str, id: str, requests: bool) -> FreeForm:
    """Texts or lists of messages; of the latter, only the completion's are learned."""
    turns = _untrained(_turns(row["prompt"], "user", f"{where}: prompt"))
    if "completion" in row or not requests:
        turns += _turns(row.get("completion"), "assistant", f"{where}: completion")
    return examples.conversation(turns, tools=row.get("tools"), where=where, id=id, requests=requests)


def _preferred(row: Row, where: str, id: str, requests: bool) -> FreeForm:
    """The chosen answer; without a prompt, chosen is the whole conversation and its last turn the answer."""
    prompt, answer = row.get("prompt"), _turns(row["chosen"], "assistant", f"{where}: chosen")
    opening = next((turn.content for turn in answer if turn.role == "user"), None)
    if opening is not None:
        if prompt not in (None, [], opening):
            raise ValueError(
                f"{where}: expected chosen to hold the answer alone, got {opening!r:.60} beside a prompt; remove one"
            )
        turns = [*_untrained(answer[:-1]), answer[-1]]
    elif prompt is None:
        raise ValueError(f"{where}: expected a prompt beside chosen, or messages with a user turn in chosen; add one")
    else:
        turns = [*_untrained(_turns(prompt, "user", f"{where}: prompt")), *answer]
    return examples.conversation(turns, tools=row.get("tools"), where=where, id=id)


def _turns(value: object, role: Role, where: str) -> list[Message]:
    """Messages, or a text as one turn of that role."""
    if isinstance(value, list | tuple):
        return examples.messages(value, where=where, requests=True)
    return [Message(role=role, content=examples.text(value, where))]


def _untrained(turns: Sequence[Message]) -> list[Message]:
    return [replace(turn, trained=False) if turn.role == "assistant" else turn for turn in turns]


_TALK = "conversation"
_CHOSEN = "the chosen answers are learned, the rejected ones are not used"
_WHOLE = "plain text without a chat template, learned from its first token on"
FORMATS: tuple[Format, ...] = (
    Format("choice", ("question", "choices", "answer"), (), _own, "choice"),
    Format("prompt-response", ("prompt", "response"), ("cut",), _own, _TALK),
    Format("messages", ("messages",), ("tools", "cut"), _own, _TALK),
    Format("alpaca", ("instruction", "output"), ("input", "system"), _alpaca, "alpaca"),
    Format("sharegpt", ("conversations",), ("system", "tools"), _sharegpt, "sharegpt"),
    Format("prompt-completion", ("prompt", "completion"), ("tools",), _completion, "prompt-completion"),
    Format("preference", ("chosen", "rejected"), ("prompt", "tools"), _preferred, "preference", note=_CHOSEN),
    Format("text", ("text",), (), _own, "text", alone=True, note=_WHOLE),
    Format("prompt", ("prompt",), ("tools",), _completion, _TALK, request=True),
    Format("instruction", ("instruction",), ("input", "system"), _alpaca, "alpaca", request=True),
)
"""The first three are this project's own and come first where a row has the keys of several formats."""
OWN = FORMATS[:3]
FIELDS = tuple(dict.fromkeys(["id", *(key for one in FORMATS for key in one.known)]))
"""Every name that a column can be mapped to."""
_CHANGES_MEANING = ("history", "images", "videos", "audios", "image", "video", "audio", "label")


def recognise(row: object, *, where: str, requests: bool = False) -> Format:
    """The one format that a row's keys fit."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    keys = set(row)
    fitting = [one for one in FORMATS if one.fits(keys) and (requests or not one.request)]
    found = [one for one in fitting if not one.request] or fitting
    if not found:
        expected = "; or ".join(", ".join(one.keys) for one in FORMATS if requests or not one.request)
        named = ", ".join(sorted(map(str, keys))) or "none"
        raise ValueError(f"{where}: expected the keys {expected}; found {named}; map others with columns")
    if found[0] in OWN:
        return found[0]
    if len(found) > 1:
        names = " and of ".join(one.name for one in found)
        raise ValueError(f"{where}: this row has the keys of {names}; remove those that are not to be read")
    strange = [key for key in _CHANGES_MEANING if row.get(key) not in (None, "", [])]
    if strange:
        raise ValueError(
            f"{where}: {found[0].name} rows are read without {strange[0]!r}, and this row has it; remove that key, "
            "or write the row as messages"
        )
    return found[0]


def read_row(row: Row, found: Format, *, where: str, id: str, requests: bool = False) -> Example:
    """The example that a row of a recognised format holds."""
    return found.read(row, where, examples.id_of(row, where=where, id=id), requests)
