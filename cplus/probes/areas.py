"""The topic areas that texts belong to by their words, whatever topic the model was told to write about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cplus.probes.settings import TOPICS
from cplus.probes.texts import normalise

_STEMS = {
    "elementary math": "arithmetic number fraction percent multipl divi subtract sum calculat triangle decimal",
    "algebra": "algebra equation polynomial quadratic variable matrix linear theorem solv formula derivative integral",
    "computer programming": "python javascript program code function algorithm software array string java html sql",
    "software debugging": "bug debug error exception crash traceback fix compil stack test patch issue",
    "biology": "biolog cell gene dna organism species evolution plant animal protein bacteria ecosystem mitochond",
    "medicine": "medic doctor patient disease symptom treatment drug health hospital therap vaccine diagnos diet",
    "physics": "physic force energy velocity gravity quantum motion magnet electric light wave particle mass momentum",
    "chemistry": "chemi molecul atom acid reaction compound element bond periodic oxygen carbon solution",
    "world history": "histor war empire century ancient revolution king civilization medieval colonial roman dynasty",
    "civics": "civic government vot election citizen democra constitution congress president parliament politic rights",
    "economics": "econom inflation market trade gdp tax supply demand monetary fiscal unemployment currency bank",
    "business": "business company startup customer marketing product sales brand profit revenue manager entrepreneur",
    "law": "law legal court judge attorney contract crime lawyer statute lawsuit justice police",
    "ethics": "ethic moral dilemma virtue fairness right wrong responsib honest principle philosoph",
    "literature": "literatur novel poem author story book fiction character poet shakespeare narrative write essay",
    "linguistics": "linguist language grammar verb noun word sentence syntax phonetic translat vocabulary",
    "geography": "geograph country countries capital river mountain continent city ocean map island population climate",
    "environmental science": "environment climate pollution renewable carbon recycl sustainab ecolog emission eco",
    "psychology": "psycholog behavior behaviour mental cognitive emotion anxiety therap memory personality motivat",
    "sports": "sport football soccer basketball team player game tennis athlete coach olympic workout match",
    "music": "music song guitar piano melody band concert rhythm jazz composer chord album singer",
    "visual art": "art artist paint sculpt drawing museum gallery design color photograph canvas visual",
    "daily life": "recipe cook home family friend shopping travel garden meal birthday hobby house clean weekend",
    "workplace decisions": "workplace employee job career boss colleague interview promotion office team project",
}
assert set(_STEMS) == set(TOPICS)
_AREAS = {area: tuple(stems.split()) for area, stems in _STEMS.items()}
_LONG = 4
"""Stems of at least so many letters match the beginning of a word, shorter ones the whole word."""


def area_of(text: str) -> str | None:
    """The area that most words of a text belong to, the first one on a tie; None if there is none.

    >>> area_of("Write a Python function that sorts an array."), area_of("Hello there!")
    ('computer programming', None)
    """
    counts: Counter[str] = Counter()
    for word in normalise(text).split():
        for area, stems in _AREAS.items():
            counts[area] += any(word.startswith(s) if len(s) >= _LONG else word in (s, s + "s") for s in stems)
    best = max(_AREAS, key=lambda area: counts[area])
    return best if counts[best] else None


def areas(texts: Sequence[str]) -> dict[str, Any]:
    """The number of texts in each area, and the number of areas that have one."""
    counts = Counter(area_of(text) for text in texts)
    return {
        "areas": len(TOPICS),
        "covered": sum(counts[area] > 0 for area in TOPICS),
        "unassigned": counts[None],
        "counts": {area: counts[area] for area in TOPICS},
    }
