"""Whether a free-text answer is right: by its text, its number, its structure or a user's function."""

from __future__ import annotations

import json
import math
import re
import string
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from cplus.base.environment import user_module
from cplus.base.files import read_json
from cplus.data.examples import Example, FreeForm
from cplus.data.prompts import normalised

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
