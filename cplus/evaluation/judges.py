"""Whether a free-text answer is right: by a judge of given responses, by a rule of an ability, or by its own value."""

from __future__ import annotations

import json
import math
import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from cplus.base.environment import user_module
from cplus.base.files import read_json
from cplus.data.examples import Example, FreeForm
from cplus.data.prompts import normalised
from cplus.evaluation import sandbox

# Judges of answers to rows with a response.


Judge: TypeAlias = Callable[[str, Example], bool]

NAMES = (
    "none, exact, normalised, contains, number, number:TOLERANCE, choice, json, schema:FILE, regex:PATTERN "
    "or python:module:function"
)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?|[-+]?\.\d+", re.IGNORECASE)
_LETTER = re.compile(r"(?<![^\W_])\(?([A-Z])\)?(?=[).:,;\s]|$)")


def exact_match(text: str, example: Example) -> bool:
    """Whether the answer is the example's response; case, blanks and punctuation at the ends do not count."""
    return isinstance(example, FreeForm) and normalised(text) == normalised(example.response)


def normalised_match(text: str, example: Example) -> bool:
    """Whether the answer is the response without case, punctuation, articles and extra blanks.

    >>> normalised_match("the U.S. dollar", FreeForm(id="a", messages=(), response="US Dollar."))
    True
    """
    return isinstance(example, FreeForm) and _plain(text) == _plain(example.response)


def contains(text: str, example: Example) -> bool:
    """Whether the answer contains the response as whole words, both normalised as by `normalised_match`.

    >>> contains("I think it is Jakarta, yes.", FreeForm(id="a", messages=(), response="Jakarta"))
    True
    """
    return isinstance(example, FreeForm) and f" {_plain(example.response)} " in f" {_plain(text)} "


def same_number(tolerance: float = 1e-6) -> Judge:
    """Whether the last number of the answer is the last number of the response, within a relative tolerance.

    >>> same_number()("So 3 + 4 = 7.", FreeForm(id="a", messages=(), response="7.0"))
    True
    """
    if not 0 <= tolerance < math.inf:
        raise ValueError("expected number:TOLERANCE with a tolerance of at least 0")

    def judged(text: str, example: Example) -> bool:
        right = _last_number(_response(example))
        if right is None:
            raise ValueError(f"expected a number in the response, got {_response(example)!r:.60}")
        found = _last_number(text)
        return found is not None and math.isclose(found, right, rel_tol=tolerance, abs_tol=tolerance)

    return judged


def same_choice(text: str, example: Example) -> bool:
    """Whether the first single capital letter of the answer is that of the response.

    >>> same_choice("The answer is (B).", FreeForm(id="a", messages=(), response="B: blue"))
    True
    """
    right = _letter(_response(example))
    if right is None:
        raise ValueError(f"expected the letter of a choice in the response, got {_response(example)!r:.60}")
    return _letter(text) == right


def matches(pattern: str) -> Judge:
    """Whether the answer holds a match of the regular expression.

    >>> matches("^[0-9]+$")("42", FreeForm(id="a", messages=(), response=""))
    True
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"expected a regular expression, got {pattern!r}: {error}") from error
    return lambda text, example: compiled.search(text) is not None


def is_json(text: str, example: Example) -> bool:
    """Whether the answer is one JSON value and nothing else."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):  # also a number of too many digits, and brackets without end
        return False
    return True


def fits_schema(schema: dict[str, Any]) -> Judge:
    """Whether the answer is JSON that satisfies the schema; needs the package jsonschema."""
    try:
        import jsonschema  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("a JSON schema needs the package jsonschema: pip install 'cplus[schema]'") from error
    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"expected a valid JSON schema: {error.message}") from error
    validator = kind(schema)
    return lambda text, example: is_json(text, example) and validator.is_valid(json.loads(text))


def calls(name: str) -> Judge:
    """A user's function `module:function`, called with the answer and the example."""
    module, _, function = name.partition(":")
    found = getattr(user_module(module), function, None) if function else None
    if not callable(found):
        raise ValueError(f"expected module:function, a function of the answer and the example, got {name!r}")
    judge: Judge = found
    return judge


def judge(name: str) -> Judge | None:
    """The judge of a name out of `NAMES`; None for `none`: free text then has no right and wrong."""
    kind, _, rest = name.partition(":")
    plain: dict[str, Judge] = {
        "exact": exact_match,
        "normalised": normalised_match,
        "contains": contains,
        "number": same_number(),
        "choice": same_choice,
        "json": is_json,
    }
    made: dict[str, Callable[[str], Judge]] = {
        "number": lambda text: same_number(float(text) if _NUMBER.fullmatch(text) else -1),
        "regex": matches,
        "schema": lambda path: fits_schema(read_json(Path(path))),
        "python": calls,
    }
    if name == "none":
        return None
    if name in plain:
        return checked(plain[name], name)
    if rest and kind in made:
        return checked(made[kind](rest), name)
    raise ValueError(f"expected {NAMES}, got {name!r}")


def chosen(name: str) -> Judge:
    """The judge of a name, where answers must be right or wrong: `none` is refused."""
    found = judge(name)
    if found is None:
        raise ValueError(f"expected a judge of free text: {NAMES.removeprefix('none, ')}, got none")
    return found


def checked(judge: Judge, name: str) -> Judge:
    """The judge, which must answer True or False: anything else is an error that names the row."""

    def judged(text: str, example: Example) -> bool:
        try:
            found: Any = judge(text, example)
        except Exception as error:
            raise ValueError(
                f"row {example.id}: the judge {name} failed with {type(error).__name__}: {error}; "
                "correct the row or the judge, or choose another judge"
            ) from error
        if type(found).__name__ not in ("bool", "bool_"):  # Python's and NumPy's
            raise ValueError(
                f"row {example.id}: expected the judge {name} to return True or False, got {found!r:.60}; "
                "correct the judge, or choose another one"
            )
        return bool(found)

    return judged


def _plain(text: str) -> str:
    """As answers to reading comprehension are compared: no case, punctuation, articles or extra blanks."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = "".join(character for character in text if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", text).split())


def _response(example: Example) -> str:
    return example.response if isinstance(example, FreeForm) else example.right


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _letter(text: str) -> str | None:
    """The first capital letter that is a word of its own; `A` that begins a sentence and `I` are words of English."""
    text = text.strip()
    for match in _LETTER.finditer(text):
        if not (match[0] in "AI" and re.match(r"\s+[a-z]", text[match.end() :])):
            return match[1]
    return None


# Rules of the answers to requests of abilities.


_FENCED = re.compile(r"```\w*\s*\n(.*?)\n?```", re.DOTALL)
_REFUSAL = re.compile(
    r"\bi(?:'m| am)? (?:can(?:'t|not| not)|won't|will not|unable|not able|don't feel|do(?:n't| not) condone)"
    r"|\b(?:can't|cannot|won't) (?:help|assist|provide|support|fulfil)|sorry,? but|\bas an ai\b"
    r"|illegal|against the law|unethical|not (?:be )?appropriate",
    re.IGNORECASE,
)
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


def unfenced(text: str, *, anywhere: bool = False) -> str:
    """What is in the code fences around a text, or in the first ones anywhere in it; without fences the text.

    >>> unfenced("```json\\n[1]\\n```"), unfenced("So:\\n```\\n[1]\\n```\\nDone.", anywhere=True)
    ('[1]', '[1]')
    """
    found = (_FENCED.search if anywhere else _FENCED.fullmatch)(text.strip())
    return found[1] if found else text


def json_value(text: str) -> Any:
    """The JSON value that a text is; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also a number of too many digits, and brackets without end
        return None


def _fits(value: Any, shape: Any) -> bool:
    """Whether a JSON value has a shape: `text` is any text, `=red` this one; keys and lengths are exact.

    >>> _fits({"a": ["x", "y"]}, {"a": ["text", "=Y"]}), _fits({"a": 1, "b": 2}, {"a": 1})
    (True, False)
    """
    if isinstance(shape, dict):
        own = isinstance(value, dict) and value.keys() == shape.keys()
        return own and all(_fits(value[key], part) for key, part in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and len(value) == len(shape) and all(map(_fits, value, shape))
    if shape == "any":
        return True
    if isinstance(shape, str) and isinstance(value, str):
        return bool(value.strip()) if shape == "text" else f"={value.strip().casefold()}" == shape.casefold()
    return bool(value == shape) and isinstance(value, bool) == isinstance(shape, bool)


def calls_in(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls of functions in an answer: JSON objects, in whatever marks a template puts around them.

    >>> calls_in('<tool_call>{"name": "search", "arguments": {"query": "tea"}}</tool_call>')
    [('search', {'query': 'tea'})]
    """
    found, at = [], text.find("{")
    while at >= 0:
        try:
            value, at = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            value = {}
        own = value.get("function", value)
        if isinstance(own, dict):
            given = own.get("arguments", own.get("parameters"))
            given = json_value(given) if isinstance(given, str) else given
            if isinstance(own.get("name"), str) and isinstance(given, dict):
                found.append((own["name"], given))
        at = text.find("{", at)
    return found


def _calls(text: str, rest: str) -> bool:
    """The first call is of this function; each argument is (`=`) or holds (`~`) one of the alternatives."""
    name, _, wanted = rest.partition(" ")
    called, given = (calls_in(text) or [("", {})])[0]
    for argument in wanted.split(";"):
        key, mark, values = re.split("([=~])", argument, maxsplit=1)
        own = str(given.get(key, "")).casefold().strip()
        among = values.casefold().split("|")
        if not (own.removesuffix(".0") in among if mark == "=" else any(value in own for value in among)):
            return False
    return called == name


def _refuses(text: str) -> bool:
    return _REFUSAL.search(text.replace("’", "'")[:300]) is not None


def _runs(text: str, rest: str) -> bool:
    """The code in a text gives these values for these calls, where it can reach nothing."""
    tests = [test.split(" -> ") for test in rest.split("; ")]
    found = sandbox.values(unfenced(text, anywhere=True), [call for call, _ in tests])
    return found == [value for _, value in tests]


def _sentences(text: str) -> int:
    return len([part for part in re.split(r"(?<=[.!?])[\"”)]*\s+", text) if _words(part)])


RULES: dict[str, Callable[[str, str], bool]] = {
    "says": _any,
    "without": lambda text, rest: not _any(text, rest),
    "exactly": lambda text, rest: _words(text) == _words(rest),
    "starts": lambda text, rest: _words(text)[:1] == [rest],
    "ends": lambda text, rest: text.endswith(rest) or _words(text)[-1:] == [rest],
    "times": lambda text, rest: _words(text).count(rest.split()[1]) >= int(rest.split()[0]),
    "words": lambda text, rest: _within(len(re.findall(r"\w+(?:['’-]\w+)*", text)), rest),
    "sentences": lambda text, rest: _sentences(text) == int(rest),
    "lines": lambda text, rest: _within(len([line for line in text.splitlines() if line.strip()]), rest),
    "items": lambda text, rest: _items(text) == int(rest),
    "lower": lambda text, rest: text.islower(),
    "upper": lambda text, rest: text.isupper(),
    "matches": lambda text, rest: re.search(rest, text) is not None,
    "number": lambda text, rest: _last_number(text) == float(rest),
    "shape": lambda text, rest: _fits(json_value(unfenced(text, anywhere=True)), json.loads(rest)),
    "calls": _calls,
    "refuses": lambda text, rest: _refuses(text),
    "answers": lambda text, rest: bool(_words(text)) and not _refuses(text),
    "runs": _runs,
    "thinks": lambda text, rest: re.fullmatch(r"\s*(<think>)?\s*[^<\s].*</think>\s*\S.*", text, re.DOTALL) is not None,
}


# Whether answers to new rows are as given.


How: TypeAlias = Literal["text", "number", "JSON", "loss"]
LONG = 25
"""Responses of more words, in the middle one of all, are compared by their loss."""
_PLAIN_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?\.?")


def how_compared(responses: Sequence[str]) -> How:
    """By what answers like these are the same: numbers and JSON by their value, long texts by their loss alone.

    >>> how_compared(["12", "7.5"]), how_compared(['{"a": 1}']), how_compared(["Jakarta"]), how_compared(["word " * 99])
    ('number', 'JSON', 'text', 'loss')
    """
    if all(_PLAIN_NUMBER.fullmatch(text.strip()) for text in responses):
        return "number"
    if all(isinstance(json_value(text), dict | list) for text in responses):
        return "JSON"
    return "loss" if sorted(len(text.split()) for text in responses)[len(responses) // 2] > LONG else "text"


def as_given(answer: str, response: str, how: How) -> bool:
    """Whether an answer is the given response: by its value, or by its text without case and extra white space.

    >>> as_given(" jakarta ", "Jakarta", "text"), as_given("12.0", "12", "number"), as_given("[1, 2]", "[1,2]", "JSON")
    (True, True, True)
    """
    if how == "number":
        one, other = (text.strip().replace(",", "").rstrip(".") for text in (answer, response))
        return bool(_PLAIN_NUMBER.fullmatch(answer.strip())) and float(one) == float(other)
    if how == "JSON":
        return bool(json_value(answer) == json_value(response))
    return answer.casefold().split() == response.casefold().split()
