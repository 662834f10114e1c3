"""The setting `keep`: what a job keeps, by name or as a file, each with its share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cplus.probes.abilities import ABILITIES, GENERAL

NONE = "none"
EXPECTED = f"{', '.join(ABILITIES)}, a file of rows, or {NONE}; several with weights, like general=0.7"


@dataclass(frozen=True)
class Kept:
    """One thing to keep and its weight: an ability, a file, or `none`."""

    name: str
    weight: float = 1.0

    @property
    def is_file(self) -> bool:
        """Whether it is neither an ability nor `none`."""
        return self.name not in (*ABILITIES, NONE)


def parse(text: str) -> Kept:
    """Read `general`, `json=0.3` or `keep.jsonl=0.5`.

    >>> parse("general=0.7"), parse("rows.jsonl").is_file
    (Kept(name='general', weight=0.7), True)
    """
    name, mark, number = text.strip().rpartition("=")
    if not mark:
        name, number = text.strip(), "1"
    try:
        weight = float(number)
    except ValueError:
        raise ValueError(f"expected {EXPECTED}, got {text!r}") from None
    if not name or not (math.isfinite(weight) and weight > 0):
        raise ValueError(f"expected {EXPECTED}, each with a weight above 0, got {text!r}")
    return Kept(name, weight)


def given_file(entries: Sequence[Kept]) -> str | None:
    """The file among the entries; its rows are anchors."""
    found = [entry.name for entry in entries if entry.is_file]
    if len(found) > 1:
        raise ValueError(f"expected one file to keep, got {' and '.join(found)}; put their rows into one file")
    return found[0] if found else None


def shares(entries: Sequence[Kept], *, anchors: bool) -> dict[str, float]:
    """The share of each ability that the base model writes itself; the rest is the anchors' share.

    >>> shares([Kept("general", 0.7), Kept("json", 0.3)], anchors=False)
    {'general': 0.7, 'json': 0.3}
    >>> shares([Kept("general")], anchors=True)
    {'general': 0.5}
    """
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError(f"expected each thing to keep once, got {max(names, key=names.count)} more than once")
    if NONE in names:
        if len(names) > 1:
            raise ValueError(f"{NONE} keeps nothing; leave it out beside {' and '.join(names)}")
        return {}
    weights = {entry.name: entry.weight for entry in entries if not entry.is_file}
    file = [entry.weight for entry in entries if entry.is_file]
    total = sum(weights.values()) + (sum(file) if file else float(anchors))
    return {name: weight / total for name, weight in weights.items()}


def default(*, given: bool) -> dict[str, float]:
    """Without the setting: the general behaviour, unless rows to keep are given."""
    return {} if given else {GENERAL: 1.0}


def allotted(count: int, weights: Mapping[str, float]) -> dict[str, int]:
    """A number of rows by shares that sum to at most 1, to the largest remainders first.

    >>> allotted(8, {"general": 0.7, "json": 0.3}), allotted(5, {"general": 0.5})
    ({'general': 6, 'json': 2}, {'general': 3})
    """
    whole = round(count * sum(weights.values()) + 1e-9)
    found = {name: int(count * weight) for name, weight in weights.items()}
    order = sorted(weights, key=lambda name: found[name] - count * weights[name])
    for name in order[: whole - sum(found.values())]:
        found[name] += 1
    return found
