"""Multiple choice answered by a letter: the paper's interface."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from string import ascii_uppercase
from typing import TYPE_CHECKING

from cplus.data.encoded import Encoded
from cplus.data.examples import Choice, Example, Message
from cplus.files import fingerprint
from cplus.interfaces.contract import Rejected
from cplus.interfaces.forms import Form, following, special_texts
from cplus.interfaces.reading import flaw, normalised, unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORDINGS = {
    "standard": "\n\nPlease reply with only {letters}. Do not provide any explanation.",
    "medqa": "\nPlease answer strictly with {letters} only. No explanation.",
}
"""How a question ends, by name: `standard` is the wording of csqa, arc_c and mmlu."""

_MARKUP = r"[\s*_#>-]*"
_ANSWER = re.compile(
    rf"{_MARKUP}(?:the\s+)?(?:correct\s+|right\s+|best\s+)?"
    r"(?:answers?|explanation|rationale|reasoning|solution)[*_]*\s*(?:is\b|[:(\u2013-]|$)",
    re.IGNORECASE,
)
_OPTION = re.compile(rf"{_MARKUP}[(\[]?([A-Z])[*_]*[.):][*_]*\s*(.*)")
_STEM = re.compile(rf"{_MARKUP}(?:new\s+|multiple-choice\s+)*question\b[^:\n]{{0,12}}:[*_]*\s*", re.IGNORECASE)
_HEADING = re.compile(rf"{_MARKUP}(?:answer\s+)?(?:options|choices)\b[*_]*:?[*_]*\s*$", re.IGNORECASE)


def spoken_letters(count: int) -> str:
    """The letters as a sentence names them.

    >>> spoken_letters(2), spoken_letters(4)
    ('A or B', 'A, B, C, or D')
    """
    letters = ascii_uppercase[:count]
    return " or ".join(letters) if count == 2 else f"{', '.join(letters[:-1])}, or {letters[-1]}"


def question_text(example: Choice) -> str:
    """The question and its lettered options, without the request to answer.

    Paper: protocol section 1.
    """
    options = "\n".join(f"{letter}: {choice}" for letter, choice in zip(ascii_uppercase, example.choices, strict=False))
    return f"Question: {example.question}\nOptions:\n{options}"


@dataclass(frozen=True, kw_only=True)
class Letter:
    """The model answers with the letter of a choice: one target token, the bare letter's."""

    tokenizer: PreTrainedTokenizerBase
    form: Form
    wording: str
    name: str = "letter"
    answer_stop: tuple[str, ...] = ()

    def text(self, example: Example) -> str:
        """The question in the task's wording, as one user message, up to where the answer begins."""
        example = _choice(example)
        letters = spoken_letters(len(example.choices))
        content = question_text(example) + WORDINGS[self.wording].format(letters=letters)
        return self.form.text([Message(role="user", content=content)])

    def prompt(self, example: Example) -> tuple[int, ...]:
        """The tokens of that text."""
        return self.form.tokens(self.text(example))

    def encode(self, example: Example) -> Encoded:
        """The prompt and the right letter's token."""
        example = _choice(example)
        return Encoded(self.prompt(example), self._token(example.answer))

    def candidates(self, example: Example) -> tuple[tuple[int, ...], ...]:
        """The token of each choice's letter."""
        return tuple(self._token(index) for index in range(len(_choice(example).choices)))

    def request(self, shots: Sequence[Example], topic: str | None) -> tuple[int, ...]:
        """Asks for one new question like the shots, which are shown without their answers."""
        questions = [question_text(_choice(shot)) for shot in shots]
        count = max(len(_choice(shot).choices) for shot in shots)
        about = "" if topic is None else f" about {topic}"
        ask = (
            f"Write one new multiple-choice question{about} in exactly the same form: a line that begins with "
            f"'Question:', a line 'Options:', then {count} different options, one a line, lettered A to "
            f"{ascii_uppercase[count - 1]}. Use other facts than the questions above. Do not give the answer."
        )
        content = "\n\n".join(["Here are multiple-choice questions.", *questions, ask])
        return self.form.tokens(self.form.text([Message(role="user", content=content)]))

    def stop(self, shots: Sequence[Example]) -> tuple[str, ...]:
        """Where an answer or an explanation begins."""
        return ("\nAnswer", "\nCorrect", "\nExplanation")

    def parse(self, text: str, shots: Sequence[Example]) -> Example | Rejected:
        """One question with all its options, distinct and not empty, or the reason why it is none.

        Paper: protocol section 3.
        """
        count = max(len(_choice(shot).choices) for shot in shots)
        stem, options = _read(unwrapped(text))
        choices = tuple(options.get(letter, "") for letter in ascii_uppercase[:count])
        if not options:
            return Rejected("no options")
        if set(options) != set(ascii_uppercase[:count]):
            return Rejected("wrong number of options")
        if not all(choices):
            return Rejected("empty option")
        if len(set(map(normalised, choices))) < count:
            return Rejected("repeated option")
        parsed = Choice(id=f"letter-{fingerprint([stem, choices])[:12]}", question=stem, choices=choices, answer=0)
        known, marks = [_choice(shot) for shot in shots], special_texts(self.tokenizer)
        reason = flaw(stem, [shot.question for shot in known], marks)
        reason = reason or flaw(question_text(parsed), [question_text(shot) for shot in known], marks)
        return parsed if reason is None else Rejected(reason)

    def with_answer(self, example: Example, answer: int | str) -> Example:
        """The question with another letter as its answer."""
        example = _choice(example)
        if not isinstance(answer, int) or not 0 <= answer < len(example.choices):
            raise ValueError(f"expected the index of one of {len(example.choices)} choices, got {answer!r}")
        return replace(example, answer=answer)

    @cached_property
    def _asked(self) -> str:
        """A prompt up to where the answer begins; the tokens of a letter depend on what is before it."""
        return self.form.text([Message(role="user", content="?")])

    def _token(self, index: int) -> tuple[int, ...]:
        """The letter's token after the prompt: SentencePiece has another one after a blank."""
        letter = ascii_uppercase[index]
        tokens = following(self.form, self.tokenizer, self._asked, self.form.lead + letter)
        if len(tokens) != 1:
            raise ValueError(
                f"expected the letter {letter!r} to be one token after the prompt, but this tokenizer makes "
                f"{len(tokens)} of it; use the cloze interface"
            )
        if (written := str(self.tokenizer.decode(tokens)).strip()) != letter:
            raise ValueError(
                f"expected a token for the letter {letter!r}, but this tokenizer reads it as {written!r}; "
                "use the cloze interface"
            )
        return tokens


def _choice(example: Example) -> Choice:
    if not isinstance(example, Choice):
        raise TypeError(f"{example.id} is free-form; the letter interface needs question, choices and answer")
    if not 2 <= len(example.choices) <= len(ascii_uppercase):
        raise ValueError(
            f"{example.id}: expected 2 to {len(ascii_uppercase)} choices for the letter interface, "
            f"got {len(example.choices)}; use the cloze interface"
        )
    return example


def _read(text: str) -> tuple[str, dict[str, str]]:
    """The stem and the lettered options of the first question in a text."""
    stem: list[str] = []
    options: dict[str, str] = {}
    for line in text.splitlines():
        option = _OPTION.match(line)
        if _ANSWER.match(line) or (options and _STEM.match(line)):
            break
        if option and option[1] in options:
            break
        if option:
            options[option[1]] = option[2].strip(" *_")
        elif not options and _STEM.match(line):
            # Whatever was said before the question is not part of it.
            stem = [_STEM.sub("", line, count=1)]
        elif not options and not _HEADING.match(line):
            stem.append(line)
    return "\n".join(line.strip(" *_") for line in stem if line.strip(" *_")), options
