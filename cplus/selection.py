"""A row of the table by its name, with its settings; a setting the row has no use for is refused."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cplus.imports import user_module
from cplus.methods import BANK, METHODS, Method


def method(name: str) -> Method:
    """The row of that name, or a user's own by `python:module:ROW`; a wrong name is answered with the nearest ones."""
    if name.startswith("python:"):
        return replace(_imported(name.removeprefix("python:")), name=name)
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=3) or list(METHODS)
        raise ValueError(f"unknown method {name!r}; did you mean {', '.join(near)}? 'cplus methods' lists them all")
    return METHODS[name]


def _imported(name: str) -> Method:
    """A row that stands in a module of the user's, found from the current folder too."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"expected python:module:ROW, got 'python:{name}'")
    try:
        found = getattr(user_module(module), attribute, None)
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"method 'python:{name}': the module {module!r} does not import: {error}") from error
    if not isinstance(found, Method):
        kind = "nothing" if found is None else f"a {type(found).__name__}"
        raise ValueError(
            f"method 'python:{name}': expected {attribute} in {module} to be a cplus.methods.Method, got {kind}"
        )
    return found


def configured(
    row: Method,
    *,
    anchor_weight: float | None = None,
    beta: float | None = None,
    parts: int | None = None,
    refresh: int | None = None,
    memory: float | None = None,
) -> Method:
    """The row with these settings; None leaves the row's own value, and one it has no use for is refused by name."""
    changes: dict[str, Any] = {}
    if anchor_weight is not None:
        _check_use(row, "anchor_weight", blends(row), "it does not blend anchors with probes", blends)
        kinds = [kind for _, kind in row.evidence]
        weights = {kind: anchor_weight if kind == "anchors" else 1.0 - anchor_weight for kind in kinds}
        changes["evidence"] = tuple((weights[kind], kind) for kind in kinds)
    if beta is not None:
        _check_use(row, "beta", row.beta is not None, "it smooths no mask", lambda other: other.beta is not None)
        changes["beta"] = beta
    if parts is not None:
        _check_use(row, "parts", shows_bank(row), "its evidence has no bank to show in parts", shows_bank)
        changes["parts"] = parts
    if refresh is not None:
        _check_use(row, "refresh", bool(row.evidence), "it takes no evidence", lambda other: bool(other.evidence))
        changes["refresh"] = refresh
    if memory is not None:
        _check_use(row, "memory", remembers(row), "it takes no evidence more than once", remembers)
        changes["memory"] = memory
    return replace(row, **changes)


def blends(row: Method) -> bool:
    """Whether the evidence weighs anchors against rows of the bank."""
    kinds = [kind for _, kind in row.evidence]
    return len(kinds) == 2 and "anchors" in kinds


def shows_bank(row: Method) -> bool:
    """Whether rows of the bank are part of the evidence."""
    return any(kind in BANK for _, kind in row.evidence)


def remembers(row: Method) -> bool:
    """Whether the evidence can be averaged over refreshes: one vector, taken more than once."""
    return bool(row.evidence) and row.vectors == "one" and row.refresh != "once"


def _check_use(row: Method, setting: str, has_use: bool, reason: str, fits: Callable[[Method], bool]) -> None:
    if not has_use:
        others = ", ".join(name for name, other in METHODS.items() if fits(other))
        raise ValueError(
            f"method {row.name!r} has no use for {setting}: {reason}; leave it out, or choose one of {others}"
        )
