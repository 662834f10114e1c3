"""Normalised texts and word sets, for finding copies."""

from __future__ import annotations

import re
import unicodedata

from cplus.data.examples import Choice, Example

# Punctuation. Arithmetic signs stay: 2 + 3 is not 2 - 3.
_MARKS = re.compile(r"""[.,;:!?'"()\[\]{}…‘’“”«»`_]|(?<=[^\W\d])-(?=[^\W\d])""")


def normalise(text: str) -> str:
    """A text with differences in case, blanks, character forms and punctuation removed.

    >>> normalise("  What’s  the\\nＣＡＰＩＴＡＬ of Peru?")
    'what s the capital of peru'
    >>> normalise("2 + 3?") == normalise("2 - 3?")
    False
    """
    return " ".join(_MARKS.sub(" ", unicodedata.normalize("NFKC", text).casefold()).split())


def words(text: str) -> frozenset[str]:
    """The normalised words of a text."""
    return frozenset(normalise(text).split())


def input_text(example: Example, *, options: bool) -> str:
    """The input of an example: its question, with the options if these are part of the input, its
    conversation, or its text."""
    if not isinstance(example, Choice) and example.is_text:
        return example.response
    if not isinstance(example, Choice):
        if example.is_text:
            return example.response
        return "\n".join(message.content for message in example.messages)
    if not options or len(example.choices) < 2:
        return example.question
    return "\n".join([example.question, *example.choices])


def input_key(example: Example, *, options: bool) -> str:
    """The normalised input; the order of the options does not matter.

    >>> a = Choice(id="a", question="Is it?", choices=("yes", "No."), answer=0)
    >>> b = Choice(id="b", question="is it", choices=("no", "yes"), answer=0)
    >>> input_key(a, options=True) == input_key(b, options=True)
    True
    """
    if isinstance(example, Choice) and options:
        return "\n".join([normalise(example.question), *sorted(normalise(choice) for choice in example.choices)])
    return normalise(input_text(example, options=options))
