"""Whether a free-text answer stayed the same, was reworded or changed: a rule on two texts and two losses, no model.

An answer is the **same** if both texts have the same words in the same order; case, punctuation, markup and blanks do
not count, nor does the order of keys in JSON. It is **changed** if something that decides its meaning was replaced:

- one text is empty, or one refuses and the other does not, or one repeats itself;
- a number, a unit, or in code an operator was replaced by another one;
- yes became no, a negation appeared or vanished among words that are otherwise alike, or a word became its opposite;
- JSON became another value or no JSON at all.

Else it is **reworded** if all of the old answer's content words are found again in the new one, or enough of them, and
**changed** if not. The measure is the F2 score of the two multisets of content words, which is free of order and weighs
what is missing more than what was added. A model that still holds the old answer gives it about the loss it had before;
each nat per token by which that loss rose beyond the noise floor asks for more similarity. Code, a replaced name, and
the same sentence with another content word in it ask for more as well.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cplus.evaluation.vocabulary import FUNCTION, NEGATIONS, NUMBER_WORDS, OPPOSITES, PREFIXES, UNITS

State: TypeAlias = Literal["same", "reworded", "changed"]

NEEDED = 0.55
"""The similarity that a reworded answer needs."""
NEEDED_PER_NAT, NEEDED_AT_MOST = 0.2, 0.9
"""What each nat per token adds by which the old answer's loss rose beyond the noise floor, and the most."""
SUBSTITUTED = 0.3
"""What code, a replaced name, or a replaced word in an unchanged sentence adds to the similarity needed."""
ALIKE = 0.55
"""The similarity of other words from which on a lone negation or opposite turns the meaning around."""


def state(
    before: str,
    after: str,
    *,
    loss_before: float | None = None,
    loss_after: float | None = None,
    noise_floor: float | None = None,
) -> State:
    """The state of an answer; losses are per token, of the old answer under the model before and the model after.

    >>> state("A week is approximately 7 days.", "A week is 7 days.")
    'reworded'
    >>> state("A week is 7 days.", "A week is 8 days.")
    'changed'
    """
    was, now = _Text.of(before), _Text.of(after)
    if was.value is not None or now.value is not None:
        return "same" if was.value == now.value else "changed"
    if was.spelled == now.spelled:
        return "same"
    if contradicts(was, now):
        return "changed"
    missing = was.content - now.content if was.content else was.stems - now.stems
    if was.refuses or not missing:
        return "reworded"
    return "reworded" if similarity(was, now) >= needed(was, now, loss_before, loss_after, noise_floor) else "changed"


def needed(
    was: _Text, now: _Text, loss_before: float | None, loss_after: float | None, noise_floor: float | None
) -> float:
    """The similarity from which on an answer counts as reworded."""
    found = NEEDED
    if loss_before is not None and loss_after is not None:
        found += NEEDED_PER_NAT * max(0.0, loss_after - loss_before - (noise_floor or 0.0))
    if was.is_code or now.is_code or _renamed(was, now) or _substituted(was, now):
        found += SUBSTITUTED
    return min(found, NEEDED_AT_MOST)


def similarity(was: _Text, now: _Text) -> float:
    """The F2 score of the new answer's content words against the old one's, from 0 to 1."""
    return _f2(was.content, now.content) if was.content and now.content else _f2(was.stems, now.stems)


def contradicts(was: _Text, now: _Text) -> bool:
    """Whether something that decides the meaning was replaced."""
    if not was.words or not now.words or was.refuses != now.refuses or now.repeats(was):
        return True
    if any(_replaced(getattr(was, part), getattr(now, part)) for part in ("numbers", "units")):
        return True
    if (was.is_code or now.is_code) and _replaced(was.operators, now.operators):
        return True
    if was.leads and now.leads and was.leads != now.leads:
        return True
    turned = was.negated != now.negated or _opposed(was, now)
    return turned and not was.refuses and similarity(was, now) >= ALIKE


@dataclass(frozen=True, kw_only=True)
class _Text:
    """What the rule reads in one text."""

    value: Any
    spelled: tuple[str, ...]
    words: tuple[str, ...]
    stems: Counter[str]
    content: Counter[str]
    frame: Counter[str]
    names: frozenset[str]
    numbers: Counter[str]
    units: frozenset[str]
    operators: Counter[str]
    leads: str
    negated: bool
    refuses: bool
    is_code: bool

    @classmethod
    def of(cls, text: str) -> _Text:
        """Read a text."""
        plain = unicodedata.normalize("NFKC", _FENCE.sub("", text)).replace("’", "'")
        is_code = bool(_CODE.search(text))
        bare = _MARKER.sub("", plain)
        words = tuple(NUMBER_WORDS.get(word, word) for word in _words(bare))
        told = _words(_IDIOM.sub(" ", bare.casefold()))
        units = [UNITS[word] for word in words if word in UNITS]
        plain_words = [word for word in words if word not in UNITS and not _is_number(word)]
        content = [word for word in plain_words if word not in FUNCTION and word not in NEGATIONS]
        return cls(
            value=_json(text),
            spelled=(*_words(plain), *(_OPERATOR.findall(plain) if is_code else ())),
            words=words,
            stems=Counter(map(_stem, words)),
            content=Counter([*map(_stem, content), *(word for word in words if _is_number(word)), *units]),
            frame=Counter(word for word in plain_words if word in FUNCTION),
            names=frozenset(name.casefold() for name in _NAME.findall(bare)),
            numbers=Counter(word for word in words if _is_number(word)),
            units=frozenset(units),
            operators=Counter(_OPERATOR.findall(bare)),
            leads=words[0] if words and words[0] in ("yes", "no") else "",
            negated=any(word in NEGATIONS for word in told),
            refuses=bool(_REFUSAL.search(bare.casefold())),
            is_code=is_code,
        )

    def repeats(self, other: _Text) -> bool:
        """Whether the text says its few words again and again, where the other did not."""
        return len(self.words) >= 8 and _variety(self.words) < 0.34 <= _variety(other.words)


def _words(text: str) -> list[str]:
    text = _CANNOT.sub("can not", text.casefold())
    text = _CONTRACTED.sub(lambda found: _WHOLE[found[0]], _GROUPED.sub("", text))
    return [word.strip("'").removesuffix("'s") for word in _WORD.findall(text)]


def _stem(word: str) -> str:
    """The first five letters: inflected forms agree in them in many languages."""
    return word[:5]


def _is_number(word: str) -> bool:
    return word[0].isdigit()


def _json(text: str) -> Any:
    """An object or a list; a bare number or string is text like any other."""
    try:
        value = json.loads(_FENCE.sub("", text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def _f2(was: Counter[str], now: Counter[str]) -> float:
    both = (was & now).total()
    if not both:
        return 0.0
    precision, recall = both / now.total(), both / was.total()
    return 5 * precision * recall / (4 * precision + recall)


def _replaced(was: Iterable[str], now: Iterable[str]) -> bool:
    old, new = set(was), set(now)
    return bool(old - new) and bool(new - old)


def _renamed(was: _Text, now: _Text) -> bool:
    """Whether each text holds a proper name that the other does not mention."""
    return bool(was.names - set(now.words)) and bool(now.names - set(was.words))


def _substituted(was: _Text, now: _Text) -> bool:
    """Whether the same sentence holds another content word: its function words are all the same."""
    return bool(was.frame) and was.frame == now.frame and _replaced(was.content, now.content)


def _opposed(was: _Text, now: _Text) -> bool:
    old, new = set(was.words) - set(now.words), set(now.words) - set(was.words)
    if any(prefix + word in new for word in old for prefix in PREFIXES):
        return True
    if any(prefix + word in old for word in new for prefix in PREFIXES):
        return True
    return any((one in old and other in new) or (one in new and other in old) for one, other in OPPOSITES)


def _variety(words: tuple[str, ...]) -> float:
    return len(set(words)) / len(words) if words else 1.0


_FENCE = re.compile(r"^\s*```[\w+-]*\s*$", re.MULTILINE)
_MARKER = re.compile(r"^\s*(?:[-*•–]|\d+[.)])\s+", re.MULTILINE)
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_CANNOT = re.compile(r"\bcannot\b|\bcan't\b")
_WHOLE = {"n't": " not", "'re": " are", "'m": " am", "'ve": " have", "'ll": " will"}
_CONTRACTED = re.compile(rf"(?:{'|'.join(_WHOLE)})\b")
# A number with its decimals or as a time, a sign for a unit, a single character of a script without blanks, a word.
_WORD = re.compile(r"\d+(?:[.:]\d+)*|[%$€£]|°\s?[cf]\b|[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_]+(?:'[^\W\d_]+)*")
_NAME = re.compile(r"(?<=[^\W\d_,;:] )(?!I\b)[A-Z][^\W_]+|(?<=[,;] )(?!I\b)[A-Z][^\W_]+")
_OPERATOR = re.compile(r"[-+*/%<>=!&|^~]+")
_CODE = re.compile(
    r"^\s*```|^\s*(?:def|class|return|import|for|while|if)\b.*:\s*$|\breturn\b.*;|;\s*$|\)\s*\{", re.MULTILINE
)
_REFUSAL = re.compile(
    r"\b(?:i|we)(?:'m| am|'re| are)?\s+(?:really |very )?(?:sorry,?\s+(?:but\s+)?(?:i|we)\s+)?"
    r"(?:can't|cannot|can not|won't|will not|not able to|unable to|do not have access|don't have access)"
    r"(?:\s+(?:help|assist|answer|provide|comply|give|do|fulfil\w*|share|discuss|support)\b|\s+to\b)?"
)
_IDIOM = re.compile(
    r"\b(?:do not|don't|please don't|never) hesitate\b|\bno (?:problem|worries|doubt)\b|\bnot only\b|\bnot at all\b"
)
