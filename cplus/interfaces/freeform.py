"""A conversation answered in the model's own words: only the response is trained on and scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cplus.data.encoded import Encoded
from cplus.data.examples import Example, FreeForm, Message
from cplus.files import fingerprint
from cplus.interfaces.contract import Rejected
from cplus.interfaces.forms import Form, following, opening, special_texts
from cplus.interfaces.reading import flaw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HEAD = "Request:"
_RULE = "\n\n---\n\n"


@dataclass(frozen=True, kw_only=True)
class Freeform:
    """The response and the end of the turn follow the conversation."""

    tokenizer: PreTrainedTokenizerBase
    form: Form
    name: str = "freeform"

    @property
    def answer_stop(self) -> tuple[str, ...]:
        """The end of the model's turn."""
        return (self.form.end,)

    def prompt(self, example: Example) -> tuple[int, ...]:
        """The conversation up to the response."""
        return self.form.tokens(self.form.text(_free(example).messages))

    def encode(self, example: Example) -> Encoded:
        """The conversation, and the response with the end of its turn."""
        example = _free(example)
        text = self.form.text(example.messages)
        answer = f"{self.form.lead}{example.response}{self.form.end}"
        return Encoded(self.form.tokens(text), following(self.form, self.tokenizer, text, answer))

    def candidates(self, example: Example) -> tuple[tuple[int, ...], ...]:
        """None: the answer is free."""
        return ()

    def request(self, shots: Sequence[Example], topic: str | None) -> tuple[int, ...]:
        """The shots' requests as a list that breaks off where the next one begins.

        Plain text even for a chat model: asked to write a request, small models answer it or chat about it.
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
        return replace(_free(example), response=answer)


def _free(example: Example) -> FreeForm:
    if not isinstance(example, FreeForm):
        raise TypeError(f"{example.id} is multiple choice; the freeform interface needs a prompt and a response")
    return example


def _asked(example: Example) -> str:
    """The last thing the user said."""
    return next(turn.content for turn in reversed(_free(example).messages) if turn.role == "user")


def _common_system(shots: Sequence[Example]) -> tuple[Message, ...]:
    """The system message, where all shots open with the same."""
    first = {_free(shot).messages[0] for shot in shots}
    return tuple(first) if len(first) == 1 and next(iter(first)).role == "system" else ()
