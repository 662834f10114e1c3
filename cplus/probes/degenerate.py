"""Signs that a model's free text is no use: loops, empty or endless texts, words of the template."""

from __future__ import annotations

import re
from itertools import pairwise

from cplus.probes.texts import normalise

NEAR = 0.7
"""Shared words divided by all words, from which on two self-written texts count as near duplicates."""
MIN_WORDS, MAX_WORDS = 3, 120
_RUN = re.compile(r"(\S.{0,24}?)\1{5,}", re.DOTALL)
_DISTINCT = 0.5
_SHORTEST = 12


def repeats(text: str) -> bool:
    """Whether a text loops: a piece six times in a row, a line three times in a row, or few different word triples.

    >>> repeats("Sports - none. Sports - none. Sports - none. Sports - none. Sports - none. Sports - none.")
    True
    >>> repeats("What is the role of the cell in the body?")
    False
    """
    if _RUN.search(re.sub(r"\d", "0", text)) is not None:
        return True
    lines = [normalise(line) for line in text.splitlines() if normalise(line)]
    if any(a == b == c for (a, b), (_, c) in pairwise(pairwise(lines))):
        return True
    spoken = normalise(text).split()
    triples = list(zip(spoken, spoken[1:], spoken[2:], strict=False))
    return len(spoken) >= _SHORTEST and len(set(triples)) < _DISTINCT * len(triples)


def text_flaw(text: str, *, most: int = MAX_WORDS) -> str | None:
    """The reason to reject a self-written text, if there is one.

    >>> text_flaw("Hi"), text_flaw("??"), text_flaw("Why is the sky blue?")
    ('too short', 'empty', None)
    """
    spoken = normalise(text).split()
    if not any(character.isalnum() for character in text):
        return "empty"
    if repeats(text):
        return "repetition"
    if len(spoken) < MIN_WORDS:
        return "too short"
    return "too long" if len(spoken) > most else None


def leaks(text: str, template: str) -> bool:
    """Whether a text repeats a line of at least four words that the chat template writes.

    >>> leaks("Sure. You are a helpful AI assistant!", "system\\nYou are a helpful AI assistant\\nuser")
    True
    """
    own = normalise(text)
    lines = (normalise(line) for line in template.splitlines())
    return any(len(line.split()) >= 4 and line in own for line in lines)


def near(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether two sets of words belong to nearly the same text.

    >>> near(frozenset("how do i bake bread".split()), frozenset("how do i bake a bread".split()))
    True
    """
    return len(one & other) >= NEAR * len(one | other) > 0
