"""Multiple choice answered in words: each choice's text after the question, compared by mean token log-likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cplus.data.encoded import Encoded
from cplus.data.examples import Choice, Example
from cplus.files import fingerprint
from cplus.interfaces.contract import Rejected
from cplus.interfaces.forms import Form, following, special_texts
from cplus.interfaces.reading import flaw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Cloze:
    """`Question: ...`, `Answer:` and the choice's words; always plain text, as a language model first learned it."""

    tokenizer: PreTrainedTokenizerBase
    form: Form
    name: str = "cloze"
    answer_stop: tuple[str, ...] = ("\n",)

    def prompt(self, example: Example) -> tuple[int, ...]:
        """The question, up to where the answer begins."""
        return self.form.tokens(_text(_choice(example)))

    def encode(self, example: Example) -> Encoded:
        """The prompt and the right choice's words."""
        example = _choice(example)
        if not example.choices:
            raise ValueError(f"{example.id} has no answer yet; label it first with with_answer")
        return Encoded(self.prompt(example), self._target(example, example.right))

    def candidates(self, example: Example) -> tuple[tuple[int, ...], ...]:
        """The words of each choice; none for an open question."""
        example = _choice(example)
        return tuple(self._target(example, choice) for choice in example.choices)

    def request(self, shots: Sequence[Example], topic: str | None) -> tuple[int, ...]:
        """The shots with their answers as a text that breaks off where the next question begins."""
        known = [_choice(shot) for shot in shots]
        lines = [f"{_text(shot)} {shot.right}\n\n" for shot in known]
        about = "" if topic is None else f"Topic: {topic}\n"
        return self.form.tokens(f"{''.join(lines)}{about}Question:")

    def stop(self, shots: Sequence[Example]) -> tuple[str, ...]:
        """The end of the line; where questions have several lines, the answer's head or a blank line."""
        return ("\nAnswer:", "\n\n") if _several_lines(shots) else ("\n",)

    def parse(self, text: str, shots: Sequence[Example]) -> Example | Rejected:
        """An open question: one line, or all up to the answer where the shots' questions have several lines."""
        known = [_choice(shot).question for shot in shots]
        if _several_lines(shots):
            question, ended, _ = text.partition("\nAnswer:")
        else:
            question, ended, _ = text.lstrip().partition("\n")
        question = question.strip()
        reason = flaw(question, known, special_texts(self.tokenizer))
        if reason is not None:
            return Rejected(reason)
        if "Answer:" in question or "Question:" in question.removeprefix("Question:"):
            return Rejected("runs on")
        if not ended:
            return Rejected("no end")
        if all(shot.endswith("?") for shot in known) and not question.endswith("?"):
            return Rejected("no question mark")
        return Choice(id=f"cloze-{fingerprint(question)[:12]}", question=question, choices=(), answer=0)

    def with_answer(self, example: Example, answer: int | str) -> Example:
        """The question with that choice as its answer; a text becomes its only choice."""
        example = _choice(example)
        if isinstance(answer, str):
            if not answer.strip():
                raise ValueError(f"{example.id}: expected an answer in words, got an empty text")
            return replace(example, choices=(answer.strip(),), answer=0)
        if not 0 <= answer < len(example.choices):
            raise ValueError(f"{example.id}: expected the index of one of {len(example.choices)} choices, got {answer}")
        return replace(example, answer=answer)

    def _target(self, example: Choice, choice: str) -> tuple[int, ...]:
        return following(self.form, self.tokenizer, _text(example), f" {choice}")


def _text(example: Choice) -> str:
    return f"Question: {example.question}\nAnswer:"


def _several_lines(shots: Sequence[Example]) -> bool:
    return any("\n" in _choice(shot).question for shot in shots)


def _choice(example: Example) -> Choice:
    if not isinstance(example, Choice):
        raise TypeError(f"{example.id} is free-form; the cloze interface needs question, choices and answer")
    return example
