"""The two forms of a prompt, chat template and plain text, and the tokens that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from jinja2 import TemplateError

from cplus.data.examples import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "ANSWER-STANDS-HERE"


class Form(Protocol):
    """How a conversation is laid out before the model's turn."""

    lead: str
    """What stands between the prompt and the answer."""

    @property
    def end(self) -> str:
        """The text that ends the model's turn."""
        ...

    def text(self, messages: Sequence[Message]) -> str:
        """The conversation up to where the model begins to speak."""
        ...

    def tokens(self, text: str) -> tuple[int, ...]:
        """The tokens of such a text."""
        ...


class Chat:
    """The tokenizer's own chat template, thinking off.

    Paper: protocol section 1.
    """

    lead = ""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"expected a tokenizer with a chat template, but {tokenizer.name_or_path or 'this one'} has none; "
                "ask in plain text instead: chat=False, or --plain on the command line"
            )
        self._tokenizer = tokenizer

    def text(self, messages: Sequence[Message]) -> str:
        """The templated conversation with the generation prompt."""
        return self._render(messages, asks=True)

    def tokens(self, text: str) -> tuple[int, ...]:
        """Tokens of a templated text, which already holds its special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def end(self) -> str:
        """What the template writes after the model's words, up to its first special token."""
        turns = (Message(role="user", content="?"), Message(role="assistant", content=_MARK))
        rest = self._render(turns, asks=False).rpartition(_MARK)[2]
        ends = [rest.index(token) + len(token) for token in special_texts(self._tokenizer) if token in rest]
        end = rest[: min(ends)] if ends else rest.rstrip()
        return end or _end_of_text(self._tokenizer)

    def _render(self, messages: Sequence[Message], *, asks: bool) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=asks, enable_thinking=False
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        return str(text)


class Plain:
    """Named turns in plain text, for a model without a chat template."""

    lead = " "

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def text(self, messages: Sequence[Message]) -> str:
        """One paragraph a turn, the last one open."""
        turns = [f"{message.role.capitalize()}: {message.content}" for message in messages]
        return "\n\n".join([*turns, "Assistant:"])

    def tokens(self, text: str) -> tuple[int, ...]:
        """Tokens of a text from its beginning."""
        return opening(self._tokenizer, text)

    @cached_property
    def end(self) -> str:
        """The tokenizer's end of text."""
        return _end_of_text(self._tokenizer)


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
    # The tokenizer merges across the border. The prompt's tokens stand, so the answer is spelled on its own.
    return tuple(tokenizer.encode(answer, add_special_tokens=False))


def special_texts(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Texts that the tokenizer reads as one mark of its own and not as words."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values())
    # Some vocabularies add runs of blanks: those are text.
    return frozenset(text for text in (*tokenizer.all_special_tokens, *added) if text.strip())


def _end_of_text(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.eos_token is None:
        raise ValueError("expected a tokenizer with an end-of-text token, so that a response can end, but it has none")
    return str(tokenizer.eos_token)
