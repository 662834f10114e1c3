"""Rows made shorter by choice: the beginning of the prompt is cut, the answer never."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

from cplus.data.encoded import Encoded
from cplus.data.examples import Choice, Example, FreeForm, Message
from cplus.interfaces.contract import Interface


def longest_row(interface: Interface, example: Example) -> Encoded:
    """The tokens of a row with its longest answer; a request alone has one token for it."""
    if own := interface.candidates(example):
        return Encoded(interface.prompt(example), max(own, key=len))
    if isinstance(example, FreeForm) and not example.answered:
        return Encoded(interface.prompt(example), (0,))
    return interface.encode(example)


def shortened(interface: Interface, example: Example, window: int) -> Example | None:
    """The row cut at the prompt's beginning to fit the window; None where that is not enough, as for a plain text.

    A conversation loses its oldest turns, whole exchanges at a time; then the last request loses its beginning, and
    then the system messages go. The answer, the choices and the tools stay.
    """

    def fits(row: Example) -> bool:
        # The last target token is predicted, never read, so it needs no place.
        return len(longest_row(interface, row)) - 1 <= window

    if fits(example):
        return example
    if isinstance(example, Choice):
        return _cut(example.question, lambda text: replace(example, question=text), fits)
    system = tuple(takewhile(lambda turn: turn.role == "system", example.messages))
    rest = example.messages[len(system) :]
    requests = [i for i, turn in enumerate(rest) if turn.role == "user"]
    if not requests:
        return None
    for start in requests[1:]:
        if fits(later := replace(example, messages=(*system, *rest[start:]))):
            return later
    asked, *after = rest[requests[-1] :]
    for first in dict.fromkeys((system, ())):

        def with_request(text: str, first: tuple[Message, ...] = first) -> Example:
            return replace(example, messages=(*first, replace(asked, content=text), *after))

        if (found := _cut(asked.content, with_request, fits)) is not None:
            return found
    return None


def _cut(text: str, row: Callable[[str], Example], fits: Callable[[Example], bool]) -> Example | None:
    """The row with the longest end of the text that fits, from the start of a word on; the last word may be cut too."""
    words = [word.span() for word in re.finditer(r"\S+", text)]
    for starts in ([start for start, _ in words], range(*words[-1])) if words else ():
        found = bisect_left(starts, True, key=lambda start: fits(row(text[start:])))
        if found < len(starts):
            return row(text[starts[found] :])
    return None
