"""What every generated text must satisfy before it becomes an example."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence

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


def flaw(text: str, shots: Sequence[str], marks: Collection[str]) -> str | None:
    """The reason to refuse a text as a new input beside the shots, if there is one.

    >>> flaw("What is snow?", ["What is ice?"], ["<end>"]), flaw("what is ice", ["What is ice?"], ["<end>"])
    (None, 'copy of a shot')
    """
    if not normalised(text):
        return "empty"
    if any(mark in text for mark in marks):
        return "template token"
    if len(text) > max(_SHORTEST_LIMIT, 3 * max(map(len, shots), default=0)):
        return "too long"
    if normalised(text) in {normalised(shot) for shot in shots}:
        return "copy of a shot"
    return None
