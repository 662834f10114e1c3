"""A conversation answered in the model's own words: only the assistant's turns are trained on and scored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeAlias

from cplus.data.encoded import Encoded
from cplus.data.examples import Example, FreeForm, Message
from cplus.files import fingerprint
from cplus.interfaces.contract import Rejected
from cplus.interfaces.forms import Form, following, opening, sequence, special_texts
from cplus.interfaces.reading import flaw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turns: TypeAlias = Literal["all", "last"]

_HEAD = "Request:"
_RULE = "\n\n---\n\n"


@dataclass(frozen=True, kw_only=True)
class Freeform:
    """The assistant's turns, each with its end, are learned and scored; the rest of the conversation is read.

    A text without a conversation is learned from its first token on, in no form but its own.
    """

    tokenizer: PreTrainedTokenizerBase
    form: Form
    turns: Turns = "all"
    """Which assistant turns are targets."""
    name: str = "freeform"

    @property
    def answer_stop(self) -> tuple[str, ...]:
        """The end of the model's turn."""
        return (self.form.end,)

    def prompt(self, example: Example) -> tuple[int, ...]:
        """The conversation up to the last response."""
        example = _free(example)
        if example.is_text:
            return self._text(example).prompt
        with _named(example):
            return self.form.tokens(self.form.text(example.messages, example.tools))

    def encode(self, example: Example) -> Encoded:
        """The conversation up to the first target, and what follows up to the end of the last response."""
        example = _free(example)
        if example.is_text:
            return self._text(example)
        with _named(example):
            if not example.answered:
                raise ValueError("this request has no response yet; answer it first with with_answer")
            earlier = any(turn.role == "assistant" and turn.trained for turn in example.messages)
            if (earlier and self.turns == "all") or example.calls or self.form.thinking:
                return self._conversation(example)
            text = self.form.text(example.messages, example.tools)
            answer = f"{self.form.lead}{example.response}{'' if example.cut else self.form.end}"
            return Encoded(self.form.tokens(text), following(self.form, self.tokenizer, text, answer))

    def _conversation(self, example: FreeForm) -> Encoded:
        """The tokens of the whole conversation; those of the assistant's turns are scored."""
        trained = [turn.trained for turn in example.turns if turn.role == "assistant"]
        if self.turns == "last":
            trained = [False] * (len(trained) - 1) + [True]
        pieces, read = [], ""
        pairs = self.form.turns(example.turns, example.tools)
        if example.cut:
            pairs[-1] = (pairs[-1][0], pairs[-1][1].removesuffix(self.form.end))
        for (before, answer), learned in zip(pairs, trained, strict=True):
            read += before
            if learned:
                pieces += [read, answer]
                read = ""
            else:
                read += answer
        prompt, *target = sequence(self.form, self.tokenizer, pieces)
        scored = [number % 2 == 0 for number, tokens in enumerate(target) for _ in tokens]
        return Encoded(prompt, tuple(chain.from_iterable(target)), () if all(scored) else tuple(scored))

    def _text(self, example: FreeForm) -> Encoded:
        tokens = opening(self.tokenizer, example.response)
        if len(tokens) < 2:
            raise ValueError(f"{example.id}: expected a text of at least two tokens, got {example.response!r:.60}")
        return Encoded(tokens[:1], tokens[1:])

    def candidates(self, example: Example) -> tuple[tuple[int, ...], ...]:
        """None: the answer is free."""
        return ()

    def request(self, shots: Sequence[Example], topic: str | None) -> tuple[int, ...]:
        """The shots' requests as a list that breaks off where the next one begins.

        Plain text even for a chat model: a small one, told to write a request, answers it or chats about it.
        """
        entries = [f"{_HEAD} {_asked(shot)}{_RULE}" for shot in shots]
        about = "" if topic is None else f"Topic: {topic}\n"
        return opening(self.tokenizer, f"{''.join(entries)}{about}{_HEAD}")

    def stop(self, shots: Sequence[Example]) -> tuple[str, ...]:
        """The rule between entries of the list."""
        return ("\n---",)

    def parse(self, text: str, shots: Sequence[Example]) -> Example | Rejected:
        """A new request, in a conversation that opens as the shots do."""
        asked, ended, _ = text.partition("\n---")
        asked = asked.strip()
        reason = flaw(asked, [_asked(shot) for shot in shots], special_texts(self.tokenizer))
        if reason is not None:
            return Rejected(reason)
        if not ended:
            return Rejected("no end")
        if _HEAD in asked:
            return Rejected("runs on")
        messages = (*_common_system(shots), Message(role="user", content=asked))
        return FreeForm(id=f"freeform-{fingerprint(asked)[:12]}", messages=messages, response="")

    def with_answer(self, example: Example, answer: int | str) -> Example:
        """The conversation with that response."""
        if not isinstance(answer, str) or not answer.strip():
            raise ValueError(f"{example.id}: expected a response in words, got {answer!r:.60}")
        return replace(_free(example), response=answer, calls="", cut=False)


def _free(example: Example) -> FreeForm:
    if not isinstance(example, FreeForm):
        raise TypeError(f"{example.id} is multiple choice; the freeform interface needs a prompt and a response")
    return example


def _asked(example: Example) -> str:
    """The last user turn's words."""
    asked = [turn.content for turn in _free(example).messages if turn.role == "user"]
    if not asked:
        raise ValueError(f"{example.id}: expected a conversation with a user turn to write others like it")
    return asked[-1]


@contextmanager
def _named(example: FreeForm) -> Iterator[None]:
    """Errors that begin with the row's id."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{example.id}: {error}") from error


def _common_system(shots: Sequence[Example]) -> tuple[Message, ...]:
    """The system message, where all shots open with the same."""
    first = {_free(shot).messages[0] for shot in shots}
    return tuple(first) if len(first) == 1 and next(iter(first)).role == "system" else ()
