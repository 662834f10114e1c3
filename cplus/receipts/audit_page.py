"""The audit of a probe bank as one page that needs nothing else; all generated text in it is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cplus.receipts.html import environment, policy


def render(audit: Mapping[str, Any], *, name: str) -> str:
    """The page of one audit, as `cplus.probes.audit.audit` gives it."""
    pages = environment()
    pages.filters["percent"] = lambda share: f"{100 * share:.2f} %"
    return pages.get_template("audit.html").render(audit=audit, name=name, policy=policy())
