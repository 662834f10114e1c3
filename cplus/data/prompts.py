"""Prompts as a chat template or as plain text, with tools written as text, and generated text read back."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta
from jinja2.ext import loopcontrols

from cplus.data.examples import Message, turn_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Tools written as text, for a chat template that knows none: the form that Hermes and Qwen models are trained on.


_OFFER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def as_text(messages: Sequence[Message], tools: str) -> list[Message]:
    """The same conversation of system, user and assistant alone, with everything about tools in their words.

    >>> calls = '[{"type": "function", "function": {"name": "add", "arguments": "{}"}}]'
    >>> as_text([Message(role="assistant", content="", calls=calls)], "")[0].content
    '<tool_call>\\n{"name": "add", "arguments": {}}\\n</tool_call>'
    """
    written: list[Message] = []
    for i, message in enumerate(messages):
        if message.role == "tool":
            result = f"<tool_response>\n{message.content}\n</tool_response>"
            if i > 0 and messages[i - 1].role == "tool":  # results of one turn's calls are one turn
                result = f"{written.pop().content}\n{result}"
            written.append(Message(role="user", content=result))
        else:
            parts = [message.content] if message.content else []
            for call in _with_objects(message.calls):
                called = {name: call["function"][name] for name in ("name", "arguments")}
                parts.append(f"<tool_call>\n{json.dumps(called, ensure_ascii=False)}\n</tool_call>")
            written.append(replace(message, content="\n".join(parts), calls=""))
    if tools:
        offer = _OFFER.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in json.loads(tools)))
        first = [written.pop(0).content] if written and written[0].role == "system" else []
        written.insert(0, Message(role="system", content="\n\n".join([*first, offer])))
    return written


def _with_objects(calls: str) -> list[dict[str, Any]]:
    """Tool calls as chat templates read them, their arguments as objects."""
    found = json.loads(calls or "[]")
    for call in found:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return found  # type: ignore[no-any-return]


# The two forms of a prompt, chat template and plain text, and the tokens that follow it.


_MARK = "ANSWER-STANDS-HERE"


class Chat:
    """The tokenizer's own chat template, thinking off by default.

    Paper: protocol section 1.
    """

    lead = ""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, thinking: bool = False) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"expected a tokenizer with a chat template, but {tokenizer.name_or_path or 'this one'} has none; "
                "use plain text instead: chat=False, or --set plain=true on the command line"
            )
        self._tokenizer = tokenizer
        self.thinking = thinking

    def text(self, messages: Sequence[Message], tools: str = "") -> str:
        """The templated conversation with the generation prompt."""
        return self._render(*self._written(messages, tools), asks=True)

    def turns(self, messages: Sequence[Message], tools: str = "") -> list[tuple[str, str]]:
        """Exactly what the template writes for the whole conversation; what it writes after the last turn is left out.

        A mark in place of one turn's words shows where they begin and end, also where the template trims them, takes
        thoughts out of earlier turns or calls the assistant by another name.
        """
        messages, tools = self._written(messages, tools)
        whole = self._render(messages, tools)
        pairs, read = [], 0
        for i, message in enumerate(messages):
            if message.role == "tool":
                self._start(messages, tools, i, whole)  # refused if the template leaves it out
            if message.role == "assistant":
                start, end = self._span(messages, tools, i, whole)
                # A template that writes no end leaves it to the end of the text, as after a single answer.
                unended = i == len(messages) - 1 and not whole[start:end].endswith(self.end)
                pairs.append((whole[read:start], whole[start:end] + (self.end if unended else "")))
                read = end
        return pairs

    def tokens(self, text: str) -> tuple[int, ...]:
        """Tokens of a templated text, which already holds its special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def end(self) -> str:
        """What the template writes after the model's words, up to its first special token."""
        turns = (Message(role="user", content="?"), Message(role="assistant", content=_MARK))
        rest = self._render(turns).rpartition(_MARK)[2]
        return self._end_of(rest, rest.rstrip())

    def asking(self, tools: str = "") -> tuple[str, str]:
        """What the template writes before a user's words, and what ends them, up to its first special token."""
        turns, tools = self._written((Message(role="user", content=_MARK),), tools)
        before, _, rest = self._render(turns, tools).partition(_MARK)
        return before, self._end_of(rest, rest.strip())

    def _end_of(self, rest: str, otherwise: str) -> str:
        """The text up to and with its first special token."""
        ends = [rest.index(token) + len(token) for token in special_texts(self._tokenizer) if token in rest]
        return rest[: min(ends, default=0)] or otherwise or _end_of_text(self._tokenizer)

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template writes tools and their calls."""
        call = {"name": "some_tool", "arguments": '{"some_argument": "value"}'}
        offer = {"name": "some_tool", "description": "?", "parameters": {"type": "object", "properties": {}}}
        turns = (
            Message(role="user", content="?"),
            Message(role="assistant", content="", calls=json.dumps([{"id": "a1b2c3d4e", "function": call}])),
            Message(role="tool", content="result", call_id="a1b2c3d4e", name="some_tool"),
        )
        try:
            offered = self._render(turns[:1], json.dumps([{"type": "function", "function": offer}]))
            called = self._render(turns)
        except ValueError:
            return False
        return "some_tool" in offered and "some_argument" in called and "result" in called

    def _written(self, messages: Sequence[Message], tools: str) -> tuple[Sequence[Message], str]:
        """The conversation as the template can write it."""
        if not (tools or any(turn.calls or turn.role == "tool" for turn in messages)) or self.knows_tools:
            return messages, tools
        return as_text(messages, tools), ""

    def _span(self, messages: Sequence[Message], tools: str, i: int, whole: str) -> tuple[int, int]:
        """Where an assistant turn's words begin in the whole text, and where the turn ends."""
        start = self._start(messages, tools, i, whole)
        if messages[i].calls:
            end = whole.find(self.end, start)
            limit = self._start(messages, tools, i + 1, whole) if i + 1 < len(messages) else len(whole)
            if start <= end < limit:
                return start, end + len(self.end)
        else:
            before, after = self._around(messages, tools, i)
            end = len(whole) - len(after)
            if before and end >= start and whole.endswith(after):
                return start, end + (len(self.end) if after.startswith(self.end) else 0)
        raise _hidden(i)

    def _start(self, messages: Sequence[Message], tools: str, i: int, whole: str) -> int:
        """Where a turn's words begin: after what the template writes before a mark, or before the model's turn."""
        before, _ = self._around(messages, tools, i)
        if before and whole.startswith(before):
            return len(before)
        if i > 0 and messages[i].role == "assistant":  # it begins with a thought, or has calls and no place for words
            for thinking in (False, True):
                with suppress(ValueError):  # the whole was written, so it is no matter if a part of it cannot be
                    asked = self._render(messages[:i], tools, asks=True, thinking=thinking)
                    if whole.startswith(asked):
                        return len(asked)
        raise _hidden(i)

    def _around(self, messages: Sequence[Message], tools: str, i: int) -> tuple[str, str]:
        """What the template writes before and after the words of a turn; nothing where it leaves them out."""
        marked = [*messages[:i], replace(messages[i], content=_MARK), *messages[i + 1 :]]
        before, found, after = self._render(marked, tools).partition(_MARK)
        return (before, after) if found else ("", "")

    def _render(
        self, messages: Sequence[Message], tools: str = "", *, asks: bool = False, thinking: bool | None = None
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [
                    turn_row(turn) | ({"tool_calls": _with_objects(turn.calls)} if turn.calls else {})
                    for turn in messages
                ],
                tools=json.loads(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=asks,
                enable_thinking=self.thinking if thinking is None else thinking,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            roles = ", ".join(message.role for message in messages)
            raise ValueError(
                f"the chat template refuses this conversation of {roles}: {error}; change the turn it cannot write, or "
                "use plain text: chat=False, or --set plain=true"
            ) from error
        return str(text)


class Plain:
    """Named turns in plain text, for a model without a chat template."""

    lead = " "
    thinking = False
    knows_tools = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.tokens = lru_cache(1 << 14)(partial(opening, tokenizer))  # every choice repeats its question

    def text(self, messages: Sequence[Message], tools: str = "") -> str:
        """One paragraph per turn, the last one open."""
        turns = [f"{message.role.capitalize()}: {message.content}" for message in as_text(messages, tools)]
        return "\n\n".join([*turns, "Assistant:"])

    def turns(self, messages: Sequence[Message], tools: str = "") -> list[tuple[str, str]]:
        """The same paragraphs; only the last turn ends the text."""
        messages = as_text(messages, tools)
        pairs, read = [], 0
        for i, message in enumerate(messages):
            if message.role == "assistant":
                whole = self.text(messages[:i])
                answer = f"{self.lead}{message.content}"
                pairs.append((whole[read:], answer + (self.end if i == len(messages) - 1 else "")))
                read = len(whole) + len(answer)
        return pairs

    @cached_property
    def end(self) -> str:
        """The tokenizer's end of text."""
        return _end_of_text(self._tokenizer)


Form: TypeAlias = Chat | Plain
"""How a conversation is written as one text.

`text` is the conversation up to where the model's turn begins, `turns` the whole as one pair for each assistant turn:
the text before it, and the turn with its end. `lead` is the text between the prompt and the answer.
"""


def _hidden(turn: int) -> ValueError:
    return ValueError(
        f"the chat template writes turn {turn} so that its tokens cannot be told from the others; train on the last "
        "turn alone: turns=last"
    )


def opening(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Tokens of a text with the mark of its beginning, where the tokenizer puts one, and without a mark of its end."""
    begin = tokenizer.bos_token_id
    marked = begin is not None and tokenizer.encode("a")[0] == begin
    body = tokenizer.encode(text, add_special_tokens=False)
    return (begin, *body) if marked else tuple(body)


def following(form: Form, tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> tuple[int, ...]:
    """The tokens of `answer` after `prompt`'s: the joint text's where it begins alike, else the answer's alone."""
    before, joint = form.tokens(prompt), form.tokens(prompt + answer)
    if joint[: len(before)] == before and len(joint) > len(before):
        return joint[len(before) :]
    # The tokenizer merges across the border. The prompt's tokens are fixed, so the answer is tokenised on its own.
    return tuple(tokenizer.encode(answer, add_special_tokens=False))


def sequence(form: Form, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """The tokens of each text after those before it: together, the tokens of the whole wherever it can be cut there."""
    first, *rest = texts
    alone = [form.tokens(first), *(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in rest)]
    if tuple(chain.from_iterable(alone)) == form.tokens("".join(texts)):
        return alone
    before = accumulate(texts)
    return [alone[0], *(following(form, tokenizer, read, text) for read, text in zip(before, rest, strict=False))]


def special_texts(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Texts that the tokenizer reads as one mark of its own and not as words."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values())
    # Some vocabularies add runs of blanks: those are text.
    return frozenset(text for text in (*tokenizer.all_special_tokens, *added) if text.strip())


def _end_of_text(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.eos_token is None:
        raise ValueError("expected a tokenizer with an end-of-text token, so that a response can end, but it has none")
    return str(tokenizer.eos_token)


# A chat template from a file, checked without a tokenizer: a broken one is refused before a model is loaded.


def read_template(path: Path) -> str:
    """The text of a template file; it must parse, and read the variable `messages`."""
    try:
        text = path.read_text(encoding="utf-8")
        # Without transformers' own tags around the assistant's words, which mean nothing here.
        plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", text)
        found = Environment(extensions=[loopcontrols], autoescape=False).parse(plain)
    except (OSError, UnicodeDecodeError, TemplateSyntaxError) as error:
        at = f":{error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ValueError(f"{path}{at}: expected a file with a chat template in Jinja: {error}") from error
    if "messages" not in meta.find_undeclared_variables(found):
        raise ValueError(f"{path}: expected a chat template, but it never reads the variable messages")
    return text


# What every generated text must satisfy before it becomes an example.


_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_FENCE = re.compile(r"^\s*```.*$", re.MULTILINE)
_SHORTEST_LIMIT = 400


def unwrapped(text: str) -> str:
    """The text without a block of thought and without code fences.

    >>> unwrapped("<think>hm</think>```text\\nWhy?\\n```")
    'Why?'
    """
    return _FENCE.sub("", _THOUGHT.sub("", text)).strip()


def normalised(text: str) -> str:
    """A text by which copies are recognised: case, width, blanks and punctuation at the ends do not count.

    >>> normalised('  "The  Capital is Jakarta." ')
    'the capital is jakarta'
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(" .,;:!?\"'`*")


def flaw(text: str, shots: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The reason to refuse a text as a new input beside the shots, if there is one."""
    if not normalised(text):
        return "empty"
    if any(mark in text for mark in special_texts(tokenizer)):
        return "template token"
    if len(text) > max(_SHORTEST_LIMIT, 3 * max(map(len, shots), default=0)):
        return "too long"
    if normalised(text) in {normalised(shot) for shot in shots}:
        return "copy of a shot"
    return None
