"""Whether a free-text answer is right: exact match, a regular expression, a JSON schema, a user's function."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from cplus.data.examples import Example, FreeForm
from cplus.files import read_json
from cplus.imports import user_module
from cplus.interfaces.reading import normalised

Judge: TypeAlias = Callable[[str, Example], bool]


def exact_match(text: str, example: Example) -> bool:
    """Whether the answer is the example's response, normalised."""
    return isinstance(example, FreeForm) and normalised(text) == normalised(example.response)


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
    return lambda text, example: bool(found(text, example))


def judge(name: str) -> Judge:
    """The judge of a name: `exact`, `json`, `regex:PATTERN`, `schema:FILE`, `python:module:function`."""
    kind, _, rest = name.partition(":")
    if name == "exact":
        return exact_match
    if name == "json":
        return is_json
    if rest and kind in ("regex", "schema", "python"):
        return {"regex": matches, "schema": lambda path: fits_schema(read_json(Path(path))), "python": calls}[kind](
            rest
        )
    raise ValueError(f"expected exact, json, regex:PATTERN, schema:FILE or python:module:function, got {name!r}")
