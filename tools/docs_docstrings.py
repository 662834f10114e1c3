"""Docstrings as Markdown: doctests become code blocks, and a formula beside its `Paper:` tag stands on its own line."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

DOCTEST = re.compile(r"(?:^|\n)((?:>>> .*)(?:\n.+)*)")
TAG = re.compile(r"^(Paper: .*?\.) {2,}(\S.*(?:\n {2,}\S.*)*)$", re.MULTILINE)


def markdown(text: str) -> str:
    """The docstring with fences around doctests and formulas."""
    text = TAG.sub(r"\1\n\n```text\n\2\n```", text)
    return DOCTEST.sub(r"\n```pycon\n\1\n```", text)


class Docstrings(Extension):  # type: ignore[misc]
    """Applies `markdown` to every docstring that is read."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
