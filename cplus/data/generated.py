"""Requests whose answers have a fixed format: a JSON object for a sentence."""

from __future__ import annotations

import json
from itertools import product

from cplus.data.examples import FreeForm, Message

JSON_REQUESTS = "json_requests"
_PEOPLE = ("Anna", "Omar", "Lena", "Ivan", "Mia", "Raj", "Noor", "Ben", "Sara", "Tom", "Yuki", "Paul")
_THINGS = ("apples", "books", "lamps", "coats", "maps", "chairs", "pens", "cups")


def json_requests() -> tuple[FreeForm, ...]:
    """Every person with every thing.

    >>> json_requests()[0].messages[0].content
    'Write a JSON object with the keys "name" and "apples" for this sentence, and nothing else: Anna has 3 apples.'
    >>> json_requests()[0].response
    '{"name": "Anna", "apples": 3}'
    """
    return tuple(
        _request(person, thing, 3 + (7 * i + 5 * j) % 40)
        for (i, person), (j, thing) in product(enumerate(_PEOPLE), enumerate(_THINGS))
    )


def _request(person: str, thing: str, count: int) -> FreeForm:
    asked = (
        f'Write a JSON object with the keys "name" and "{thing}" for this sentence, and nothing else: '
        f"{person} has {count} {thing}."
    )
    return FreeForm(
        id=f"{JSON_REQUESTS}/{person.lower()}-{thing}",
        messages=(Message(role="user", content=asked),),
        response=json.dumps({"name": person, thing: count}),
    )
