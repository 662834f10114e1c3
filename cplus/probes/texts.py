"""Texts by which copies are recognised: normalised, and as sets of words."""

from __future__ import annotations

import re
import unicodedata

from cplus.data.examples import Choice, Example

# Marks of a sentence. Those of arithmetic stay: 2 + 3 is not 2 - 3.
_MARKS = re.compile(r"""[.,;:!?'"()\[\]{}…‘’“”«»`_]|(?<=[^\W\d])-(?=[^\W\d])""")


def normalise(text: str) -> str:
    """A text without what does not make it another: case, blanks, forms of a character, marks of a sentence.

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
    """What an example asks: its question, with the options where they are part of the input, or its conversation."""
    if not isinstance(example, Choice):
        if example.is_text:
            return example.response
        return "\n".join(message.content for message in example.messages)
    if not options or len(example.choices) < 2:
        return example.question
    return "\n".join([example.question, *example.choices])


def input_key(example: Example, *, options: bool) -> str:
    """The normalised input; options in any order are the same question.

    >>> a = Choice(id="a", question="Is it?", choices=("yes", "No."), answer=0)
    >>> b = Choice(id="b", question="is it", choices=("no", "yes"), answer=0)
    >>> input_key(a, options=True) == input_key(b, options=True)
    True
    """
    if isinstance(example, Choice) and options:
        return "\n".join([normalise(example.question), *sorted(normalise(choice) for choice in example.choices)])
    return normalise(input_text(example, options=options))
