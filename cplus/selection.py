"""A method by its name, with its settings; a setting that the method does not have is refused."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cplus.imports import user_module
from cplus.methods import BANK, METHODS, Method


def method(name: str) -> Method:
    """The method of that name, or a user's own as `python:module:ROW`; an unknown name raises with suggestions."""
    if name.startswith("python:"):
        return replace(_imported(name.removeprefix("python:")), name=name)
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=3) or list(METHODS)
        raise ValueError(f"unknown method {name!r}; did you mean {', '.join(near)}? 'cplus methods' lists them all")
    return METHODS[name]


def _imported(name: str) -> Method:
    """A method from a user's module, which is also searched for in the current folder."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"expected python:module:ROW, got 'python:{name}'")
    try:
        found = getattr(user_module(module), attribute, None)
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"method 'python:{name}': the module {module!r} cannot be imported: {error}") from error
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
    ema: str | None = None,
    parts: int | None = None,
    refresh: int | None = None,
    memory: float | None = None,
    strength: float | None = None,
) -> Method:
    """The method with these settings; None keeps its own value, and a setting it does not have is refused by name."""
    changes: dict[str, Any] = {}
    if anchor_weight is not None:
        _check_use(row, "anchor_weight", blends(row), "it does not blend anchors with probes", blends)
        kinds = [kind for _, kind in row.evidence]
        weights = {kind: anchor_weight if kind == "anchors" else 1.0 - anchor_weight for kind in kinds}
        changes["evidence"] = tuple((weights[kind], kind) for kind in kinds)
    if beta is not None:
        _check_use(row, "beta", row.beta is not None, "it smooths no mask", lambda other: other.beta is not None)
        changes["beta"] = beta
    if ema is not None:
        _check_use(row, "ema", row.beta is not None, "it smooths no mask", lambda other: other.beta is not None)
        changes["ema"] = ema
    if parts is not None:
        _check_use(row, "parts", shows_bank(row), "its evidence has no bank to split into parts", shows_bank)
        changes["parts"] = parts
    if refresh is not None:
        _check_use(row, "refresh", bool(row.evidence), "it uses no evidence", lambda other: bool(other.evidence))
        changes["refresh"] = refresh
    if memory is not None:
        _check_use(row, "memory", remembers(row), "it does not refresh any evidence", remembers)
        changes["memory"] = memory
    if strength is not None:
        name = row.part_with_strength
        reason = "it has no penalty, threshold or share to choose"
        _check_use(row, "strength", name is not None, reason, lambda other: other.part_with_strength is not None)
        assert name is not None
        changes[name] = replace(getattr(row, name), strength=strength)
    return replace(row, **changes)


def blends(row: Method) -> bool:
    """Whether the evidence blends anchors with rows of the bank."""
    kinds = [kind for _, kind in row.evidence]
    return len(kinds) == 2 and "anchors" in kinds


def shows_bank(row: Method) -> bool:
    """Whether the evidence includes rows of the bank."""
    return any(kind in BANK for _, kind in row.evidence)


def remembers(row: Method) -> bool:
    """Whether the evidence can be averaged over refreshes: one vector, computed more than once."""
    return bool(row.evidence) and row.vectors == "one" and row.refresh != "once"


def _check_use(row: Method, setting: str, has_use: bool, reason: str, fits: Callable[[Method], bool]) -> None:
    if not has_use:
        others = ", ".join(name for name, other in METHODS.items() if fits(other))
        raise ValueError(
            f"method {row.name!r} has no use for {setting}: {reason}; leave it out, or choose one of {others}"
        )
