"""How a row is written, answered and scored: by letter, by cloze, or in free form."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, takewhile
from string import ascii_uppercase
from typing import TYPE_CHECKING, TypeAlias

from cplus.base.files import fingerprint
from cplus.core.rows import Encoded
from cplus.data import prompts
from cplus.data.examples import Choice, Example, FreeForm, Message
from cplus.data.prompts import Chat, Form, Plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why a generated text is not an example of the task."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class _Closed:
    """What both interfaces of multiple choice share: a target for each choice, of which the right one is learned."""

    tokenizer: PreTrainedTokenizerBase
    form: Form

    def text(self, example: Choice) -> str:
        """The question, up to where the answer begins."""
        raise NotImplementedError

    def target(self, example: Choice, index: int) -> tuple[int, ...]:
        """The tokens of a choice after that text."""
        raise NotImplementedError

    def prompt(self, example: Example) -> tuple[int, ...]:
        """The tokens of the question."""
        return self.form.tokens(self.text(_choice(example)))

    def encode(self, example: Example) -> Encoded:
        """The prompt and the right choice's target."""
        example = _choice(example)
        if not example.choices:
            raise ValueError(f"{example.id} has no answer yet; label it first with with_answer")
        return Encoded(self.prompt(example), self.target(example, example.answer))

    def candidates(self, example: Example) -> tuple[tuple[int, ...], ...]:
        """The target of each choice; none for an open question."""
        example = _choice(example)
        return tuple(self.target(example, index) for index in range(len(example.choices)))

    def with_answer(self, example: Example, answer: int | str) -> Example:
        """The question with that choice as its answer."""
        example = _choice(example)
        if not isinstance(answer, int) or not 0 <= answer < len(example.choices):
            raise ValueError(
                f"{example.id}: expected the index of one of {len(example.choices)} choices, got {answer!r}"
            )
        return replace(example, answer=answer)


def _choice(example: Example) -> Choice:
    if not isinstance(example, Choice):
        raise TypeError(f"{example.id} is free-form; letter and cloze need question, choices and answer")
    return example


# Multiple choice answered by a letter: the paper's interface.


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


def _letters(example: Choice) -> str:
    """The letters of the choices."""
    if not 2 <= len(example.choices) <= len(ascii_uppercase):
        raise ValueError(
            f"{example.id}: expected 2 to {len(ascii_uppercase)} choices for the letter interface, "
            f"got {len(example.choices)}; use the cloze interface"
        )
    return ascii_uppercase[: len(example.choices)]


def question_text(example: Choice) -> str:
    """The question and its lettered options, without the request to answer.

    Paper: protocol section 1.
    """
    options = "\n".join(f"{letter}: {choice}" for letter, choice in zip(ascii_uppercase, example.choices, strict=False))
    return f"Question: {example.question}\nOptions:\n{options}"


@dataclass(frozen=True, kw_only=True)
class Letter(_Closed):
    """The model answers with the letter of a choice: one target token, the bare letter's."""

    wording: str
    name: str = "letter"
    answer_stop: tuple[str, ...] = ()

    def text(self, example: Choice) -> str:
        """The question in the task's wording, as one user message, up to where the answer begins."""
        *others, last = list(_letters(example))
        spoken = f"{', '.join(others)}{',' if len(others) > 1 else ''} or {last}"
        content = question_text(example) + WORDINGS[self.wording].format(letters=spoken)
        return self.form.text([Message(role="user", content=content)])

    def target(self, example: Choice, index: int) -> tuple[int, ...]:
        """The letter's token after the prompt: SentencePiece has another one after a blank."""
        letter = _letters(example)[index]
        tokens = prompts.following(self.form, self.tokenizer, self._asked, self.form.lead + letter)
        if len(tokens) != 1 or str(self.tokenizer.decode(tokens)).strip() != letter:
            raise ValueError(
                f"expected the letter {letter!r} to be one token after the prompt, but this tokenizer makes "
                f"{len(tokens)} of it, {self.tokenizer.decode(tokens)!r}; use the cloze interface"
            )
        return tokens

    @cached_property
    def _asked(self) -> str:
        """A prompt up to where the answer begins; the tokens of a letter depend on what is before it."""
        return self.form.text([Message(role="user", content="?")])

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
        stem, options = _read(prompts.unwrapped(text))
        choices = tuple(options.get(letter, "") for letter in ascii_uppercase[:count])
        parsed = Choice(id=f"letter-{fingerprint([stem, choices])[:12]}", question=stem, choices=choices, answer=0)
        known = [_choice(shot) for shot in shots]
        reasons = {
            "no options": not options,
            "wrong number of options": set(options) != set(ascii_uppercase[:count]),
            "empty option": not all(choices),
            "repeated option": len(set(map(prompts.normalised, choices))) < count,
        }
        reason = (
            _first(reasons)
            or prompts.flaw(stem, [shot.question for shot in known], self.tokenizer)
            or prompts.flaw(question_text(parsed), [question_text(shot) for shot in known], self.tokenizer)
        )
        return parsed if reason is None else Rejected(reason)


def _first(reasons: Mapping[str, bool]) -> str | None:
    """The first reason that holds."""
    return next((reason for reason, holds in reasons.items() if holds), None)


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


# Multiple choice answered in words: each choice's text after the question, compared by mean token log-likelihood.


@dataclass(frozen=True, kw_only=True)
class Cloze(_Closed):
    """`Question: ...`, `Answer:` and the choice's words; always plain text, as a language model first learned it."""

    name: str = "cloze"
    answer_stop: tuple[str, ...] = ("\n",)

    def text(self, example: Choice) -> str:
        """The question, up to where the answer begins."""
        return f"Question: {example.question}\nAnswer:"

    def target(self, example: Choice, index: int) -> tuple[int, ...]:
        """The words of a choice."""
        return prompts.following(self.form, self.tokenizer, self.text(example), f" {example.choices[index]}")

    def request(self, shots: Sequence[Example], topic: str | None) -> tuple[int, ...]:
        """The shots with their answers as a text that breaks off where the next question begins."""
        known = [_choice(shot) for shot in shots]
        lines = [f"{self.text(shot)} {shot.right}\n\n" for shot in known]
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
        reasons = {
            "runs on": "Answer:" in question or "Question:" in question.removeprefix("Question:"),
            "no end": not ended,
            "no question mark": all(shot.endswith("?") for shot in known) and not question.endswith("?"),
        }
        if (reason := prompts.flaw(question, known, self.tokenizer) or _first(reasons)) is not None:
            return Rejected(reason)
        return Choice(id=f"cloze-{fingerprint(question)[:12]}", question=question, choices=(), answer=0)

    def with_answer(self, example: Example, answer: int | str) -> Example:
        """The question with that choice as its answer; a text becomes its only choice."""
        if not isinstance(answer, str):
            return super().with_answer(example, answer)
        if not answer.strip():
            raise ValueError(f"{example.id}: expected an answer in words, got an empty text")
        return replace(_choice(example), choices=(answer.strip(),), answer=0)


def _several_lines(shots: Sequence[Example]) -> bool:
    return any("\n" in _choice(shot).question for shot in shots)


# A conversation answered in the model's own words: only the assistant's turns are trained on and scored.


_HEAD = "Request:"
_RULE = "\n\n---\n\n"


@dataclass(frozen=True, kw_only=True)
class Freeform:
    """The assistant's turns, each with its end, are learned and scored; the rest of the conversation is read.

    A text without a conversation is learned from its first token on, in no form but its own.
    """

    tokenizer: PreTrainedTokenizerBase
    form: Form
    turns: str = "all"
    """Which assistant turns are targets, `all` or `last`."""
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
            return Encoded(self.form.tokens(text), prompts.following(self.form, self.tokenizer, text, answer))

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
        prompt, *target = prompts.sequence(self.form, self.tokenizer, pieces)
        scored = [number % 2 == 0 for number, tokens in enumerate(target) for _ in tokens]
        return Encoded(prompt, tuple(chain.from_iterable(target)), () if all(scored) else tuple(scored))

    def _text(self, example: FreeForm) -> Encoded:
        tokens = prompts.opening(self.tokenizer, example.response)
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
        return prompts.opening(self.tokenizer, f"{''.join(entries)}{about}{_HEAD}")

    def stop(self, shots: Sequence[Example]) -> tuple[str, ...]:
        """The rule between entries of the list."""
        return ("\n---",)

    def parse(self, text: str, shots: Sequence[Example]) -> Example | Rejected:
        """A new request, in a conversation that opens as the shots do."""
        asked, ended, _ = text.partition("\n---")
        asked = asked.strip()
        flaw = prompts.flaw(asked, [_asked(shot) for shot in shots], self.tokenizer)
        if (reason := flaw or _first({"no end": not ended, "runs on": _HEAD in asked})) is not None:
            return Rejected(reason)
        opening = {_free(shot).messages[0] for shot in shots}
        shared = [turn for turn in opening if turn.role == "system" and len(opening) == 1]
        messages = (*shared, Message(role="user", content=asked))
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


# How a task's rows are written, answered and scored: `letter`, `cloze`, `freeform`.


Interface: TypeAlias = Letter | Cloze | Freeform
"""Bound to one tokenizer; pure: the same example always gives the same tokens.

`prompt` is the question alone, `encode` the prompt and the right target, which training and evidence see; for several
learned turns the target begins at the first, so that this prompt may be shorter. `candidates` are the answers that can
be given, none where answers are free text. `request` prompts the frozen model for one new input like the shots, `parse`
reads it up to and with one of the `stop` texts, and `with_answer` sets the frozen model's own answer as its target.
"""

NAMES = ("letter", "cloze", "freeform")


def build(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    wording: str = "standard",
    chat: bool = True,
    turns: str = "all",
    thinking: str = "off",
) -> Interface:
    """The interface of that name, bound to a tokenizer.

    `wording` is the letter's. `turns` and `thinking` are the free form's: which assistant turns are targets, and
    whether a model that thinks does so (`keep`) or is told not to (`off`). Cloze is always plain text.
    """
    for what, given, known in (
        ("interface", name, NAMES),
        ("wording", wording, WORDINGS),
        ("turns", turns, ("all", "last")),
        ("thinking", thinking, ("off", "keep")),
    ):
        if given not in known:
            raise ValueError(f"expected {what} to be one of {', '.join(known)}, got {given!r}")
    if name == "cloze":
        return Cloze(tokenizer=tokenizer, form=Plain(tokenizer))
    form = Chat(tokenizer, thinking=thinking == "keep" and name == "freeform") if chat else Plain(tokenizer)
    if name == "letter":
        return Letter(tokenizer=tokenizer, form=form, wording=wording)
    return Freeform(tokenizer=tokenizer, form=form, turns=turns)


def tokens_by_role(interface: Interface, examples: Iterable[Example]) -> dict[str, int]:
    """The number of tokens by whose words they are: system, user, assistant, tool, template or text.

    Turns that are learned count with the end of the turn, the others by their words alone; `template` is the rest:
    names of roles, tools, marks. A multiple-choice prompt counts as the user's.
    """
    counts: Counter[str] = Counter()
    for example in examples:
        row = interface.encode(example)
        if isinstance(example, Choice):
            own = Counter(user=len(row.prompt), assistant=len(row.target))
        elif example.is_text:
            own = Counter(text=len(row))
        else:
            own = Counter(assistant=row.num_scored)
            learned = isinstance(interface, Freeform) and interface.turns == "all"
            for turn in example.messages:
                if turn.role != "assistant" or not (learned and turn.trained):
                    own[turn.role] += len(interface.tokenizer.encode(turn.content, add_special_tokens=False))
            own["template"] = max(0, len(row) - own.total())
        counts += own
    return dict(counts)


# Rows made shorter by choice: the beginning of the prompt is cut, the answer never.


def longest_row(interface: Interface, example: Example) -> Encoded:
    """The tokens of a row with its longest answer; a request alone has one token for it."""
    if own := interface.candidates(example):
        return Encoded(interface.prompt(example), max(own, key=len))
    if isinstance(example, FreeForm) and not example.answered:
        return Encoded(interface.prompt(example), (0,))
    return interface.encode(example)


def shortened(interface: Interface, example: Example, window: int) -> Example | None:
    """The row cut at the prompt's beginning to fit the window; None where that is not enough, as for a plain text.

    A conversation loses its oldest turns, whole exchanges at a time, and then the last request loses its beginning. The
    system messages, the answer, the choices and the tools stay.
    """

    def fits(row: Example) -> bool:
        # The last target token is predicted, never read, so it needs no place.
        return len(longest_row(interface, row)) - 1 <= window

    if fits(example):
        return example
    if isinstance(example, Choice):
        text = example.question
    else:
        system = tuple(takewhile(lambda turn: turn.role == "system", example.messages))
        requests = [i for i, turn in enumerate(example.messages) if turn.role == "user"]
        for start in requests[1:]:
            if fits(later := replace(example, messages=(*system, *example.messages[start:]))):
                return later
        if not requests:
            return None
        asked, *after = example.messages[requests[-1] :]
        text = asked.content

    def cut(start: int) -> Example:
        if isinstance(example, Choice):
            return replace(example, question=text[start:])
        return replace(example, messages=(*system, replace(asked, content=text[start:]), *after))

    words = [word.start() for word in re.finditer(r"\S+", text)]
    found = bisect_left(words, True, key=lambda start: fits(cut(start)))
    return cut(words[found]) if found < len(words) else None
