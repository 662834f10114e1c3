"""Named abilities: requests with checkable answers, and what a model has kept of each; they only measure.

A row of `abilities.jsonl` is one request, its rules, all of which an answer must follow, and an answer that does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

from cplus.data.examples import FreeForm, Message
from cplus.evaluation.statistics import Rate, RateRow, mcnemar_interval

ERROR = 0.05
"""The chance of calling an undamaged model damaged, over all lines of one verdict together."""
FEWEST = 10
"""A line is judged where the base model answers at least this many requests correctly."""
STOPPING = "stopping"
"""The line of answers that end by themselves, over the requests of every ability."""
STOPPING_NOISE = 0.1

Verdict: TypeAlias = Literal["kept", "damaged", "unclear", "not judged"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request with its rules, and an answer that follows them."""

    id: str
    request: str
    rules: tuple[str, ...]
    answer: str

    @property
    def example(self) -> FreeForm:
        """The request as a row; its response says what is expected."""
        return FreeForm(id=self.id, messages=(Message(role="user", content=self.request),), response=self.answer)

    def right(self, text: str) -> bool:
        """Whether an answer follows every rule."""
        return all(follows(text.strip(), rule) for rule in self.rules)


@dataclass(frozen=True, kw_only=True)
class Ability:
    """What one ability is measured by.

    `noise` is the share of right answers whose loss is no sign of damage: rounding the weights to 8 bits costs as many.
    """

    summary: str
    max_new_tokens: int
    noise: float


ABILITIES = {
    "everyday": Ability(summary="short questions: facts, sums, spelling, formats", max_new_tokens=32, noise=0.1),
    "instructions": Ability(summary="demands on length, format, words and case", max_new_tokens=48, noise=0.1),
}


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Names of abilities; `none` stands for no ability.

    >>> chosen(["everyday"]), chosen(["none"])
    (('everyday',), ())
    """
    if list(names) == ["none"]:
        return ()
    if wrong := [name for name in names if name not in ABILITIES]:
        raise ValueError(f"expected abilities out of {', '.join(ABILITIES)}, or none alone, got {wrong[0]!r}")
    return tuple(dict.fromkeys(names))


@cache
def requests(name: str) -> tuple[Request, ...]:
    """The requests of an ability."""
    rows = map(json.loads, Path(__file__).with_name("abilities.jsonl").read_text(encoding="utf-8").splitlines())
    return tuple(
        Request(id=row["id"], request=row["request"], rules=tuple(row["rules"]), answer=row["answer"])
        for row in rows
        if row["ability"] == name
    )


# The rules of an answer.


_FENCED = re.compile(r"\A\s*```\w*\s*\n(.*?)\n?```\s*\Z", re.DOTALL)
_ITEM = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+\S", re.MULTILINE)


def follows(text: str, rule: str) -> bool:
    """Whether a text follows a rule, which is a name of `RULES` and what that rule needs.

    >>> follows("It has 1,000 grams.", "says 1000|thousand"), follows("a, b and c", "items 3"), follows("No.", "upper")
    (True, True, False)
    """
    name, _, rest = rule.partition(" ")
    return RULES[name](text, rest)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", re.sub(r"(?<=\d),(?=\d{3})", "", text.casefold()))


def _any(text: str, rest: str) -> bool:
    """Whether one of the alternatives is in the text as whole words."""
    own = f" {' '.join(_words(text))} "
    return any(f" {' '.join(_words(one))} " in own for one in rest.split("|"))


def _within(count: int, rest: str) -> bool:
    low, high = rest.split()
    return int(low) <= count <= int(high)


def _items(text: str) -> int:
    """The marked lines of a list, else its lines, else what commas separate."""
    lines = [line for line in text.splitlines() if line.strip()]
    if marked := len(_ITEM.findall(text)):
        return marked
    return len(lines) if len(lines) > 1 else len([one for one in re.split(r",|\band\b", text) if one.strip(" .")])


def _json(text: str, rest: str) -> bool:
    """JSON, in code fences or not: a list of a length, or an object with these keys and values."""
    fenced = _FENCED.match(text)
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    if rest.startswith("list "):
        return isinstance(value, list) and len(value) == int(rest.split()[1])
    pairs = [pair.partition("=") for pair in rest.split(",")]
    return isinstance(value, dict) and all(
        key in value and (not mark or str(value[key]).casefold() == wanted) for key, mark, wanted in pairs
    )


def _sentences(text: str) -> int:
    return len([part for part in re.split(r"(?<=[.!?])[\"”)]*\s+", text) if _words(part)])


RULES: dict[str, Callable[[str, str], bool]] = {
    "says": _any,
    "without": lambda text, rest: not _any(text, rest),
    "first": lambda text, rest: _words(text)[:1] == [rest],
    "exactly": lambda text, rest: _words(text) == _words(rest),
    "starts": lambda text, rest: _words(text)[:1] == [rest],
    "ends": lambda text, rest: text.endswith(rest) or _words(text)[-1:] == [rest],
    "times": lambda text, rest: _words(text).count(rest.split()[1]) >= int(rest.split()[0]),
    "words": lambda text, rest: _within(len(re.findall(r"\w+(?:['’-]\w+)*", text)), rest),
    "sentences": lambda text, rest: _sentences(text) == int(rest),
    "lines": lambda text, rest: _within(len([line for line in text.splitlines() if line.strip()]), rest),
    "items": lambda text, rest: _items(text) == int(rest),
    "json": _json,
    "lower": lambda text, rest: text.islower(),
    "upper": lambda text, rest: text.isupper(),
    "matches": lambda text, rest: re.search(rest, text) is not None,
}


# What became of an ability: one line of the verdict.


class Line(TypedDict):
    """One line of the verdict, by rows that were answered before and after.

    `kept` are those right before that are right after. `net` is lost less gained in points of all rows, from `low` to
    `high` by the exact McNemar test at the corrected level; `needed` is the smallest number of lost rows that can be
    called damage, and `missed` names the rows that were lost.
    """

    name: str
    rows: int
    kept: RateRow | None
    lost: int
    gained: int
    missed: list[str]
    net: float
    low: float
    high: float
    p: float
    needed: int
    verdict: Verdict


def line(name: str, rows: Sequence[tuple[str, bool, bool]], *, noise: float, lines: int) -> Line:
    """Judge one of several lines from each row's name and whether it was right before and after.

    Damage is a loss that the exact one-sided McNemar test finds at `ERROR` divided by the number of lines.

    >>> found = line("everyday", [(str(i), True, i > 6) for i in range(30)], noise=0.1, lines=3)
    >>> found["verdict"], found["lost"], found["needed"]
    ('damaged', 7, 6)
    """
    missed = [id for id, before, after in rows if before and not after]
    known, gained = sum(before for _, before, _ in rows), sum(after and not before for _, before, after in rows)
    level, lost = ERROR / lines, len(missed)
    p, low, high = mcnemar_interval(lost, gained, len(rows), level)
    if known < FEWEST:
        verdict: Verdict = "not judged"
    elif p < level:
        verdict = "damaged"
    else:
        verdict = "kept" if lost - gained <= noise * known else "unclear"
    return {
        "name": name,
        "rows": len(rows),
        "kept": Rate(known - lost, known).row() if known else None,
        "lost": lost,
        "gained": gained,
        "missed": missed,
        "net": 100 * (lost - gained) / len(rows),
        "low": low,
        "high": high,
        "p": p,
        "needed": math.floor(-math.log2(level)) + 1,
        "verdict": verdict,
    }


def overall(lines: Sequence[Line]) -> Verdict:
    """Damaged where one line is; kept where all are; unclear where one cannot say.

    >>> overall([])
    'not judged'
    """
    found = [one["verdict"] for one in lines]
    if "damaged" in found:
        return "damaged"
    if set(found) <= {"not judged"}:
        return "not judged"
    return "kept" if set(found) == {"kept"} else "unclear"


# Whether answers to new rows are as given.


How: TypeAlias = Literal["text", "number", "JSON", "loss"]
LONG = 25
"""Responses of more words, in the middle one of all, are compared by their loss."""
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?\.?")


def how_compared(responses: Sequence[str]) -> How:
    """By what answers like these are the same: numbers and JSON by their value, long texts by their loss alone.

    >>> how_compared(["12", "7.5"]), how_compared(['{"a": 1}']), how_compared(["Jakarta"]), how_compared(["word " * 99])
    ('number', 'JSON', 'text', 'loss')
    """
    if all(_NUMBER.fullmatch(text.strip()) for text in responses):
        return "number"
    if all(isinstance(_value(text), dict | list) for text in responses):
        return "JSON"
    return "loss" if sorted(len(text.split()) for text in responses)[len(responses) // 2] > LONG else "text"


def as_given(answer: str, response: str, how: How) -> bool:
    """Whether an answer is the given response: by its value, or by its text without case and extra white space.

    >>> as_given(" jakarta ", "Jakarta", "text"), as_given("12.0", "12", "number"), as_given("[1, 2]", "[1,2]", "JSON")
    (True, True, True)
    """
    if how == "number":
        one, other = (text.strip().replace(",", "").rstrip(".") for text in (answer, response))
        return bool(_NUMBER.fullmatch(answer.strip())) and float(one) == float(other)
    if how == "JSON":
        return bool(_value(answer) == _value(response))
    return answer.casefold().split() == response.casefold().split()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
