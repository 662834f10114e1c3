"""A small table for a notebook: what was kept and learned, and where to read on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from cplus.evaluation.requirements import sentence

_CELL = "padding:2px 10px;text-align:{}"


def of_figures(headline: str, figures: Mapping[str, Any], links: Mapping[str, str]) -> str:
    """The figures of a finished job: its headline, each set of rows before and after, requirements, and its files."""
    rows = [row for own in figures["sets"] for row in _set(own)]
    files = " · ".join(f"{escape(name)}: <code>{escape(path)}</code>" for name, path in links.items())
    said = "".join(f"<br>{escape(sentence(found))}" for found in figures["requirements"])
    shown = table(("rows", "", "before", "after"), rows)
    return f"<div><b>{escape(headline)}</b>{said}{shown}<small>{files}</small></div>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table; all text is escaped, and columns after the first two are numbers.

    >>> table(("a", "b"), [("<x>", "1")]).count("&lt;x&gt;")
    1
    """
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    sides = ["left" if column < 2 else "right" for column in range(len(cells))]
    shown = (
        f'<{tag} style="{_CELL.format(side)}">{escape(text)}</{tag}>' for side, text in zip(sides, cells, strict=True)
    )
    return f"<tr>{''.join(shown)}</tr>"


def _set(own: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A set's share of right answers, and its loss, where each was measured."""
    name = f"{own['name']} ({own['rows']:,})"
    lines: list[tuple[str, ...]] = []
    if own["before"] and own["after"]:
        lines.append((name, "right", *(f"{own[when]['percent']:.1f} %" for when in ("before", "after"))))
    if own["nll"]:
        lines.append((name, "loss per token", *(f"{own['nll'][when]:.3f}" for when in ("before", "after"))))
    return lines
