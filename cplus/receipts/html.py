"""What every page shares: templates that escape all text, one base style, a policy that lets nothing else in."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).parent / "templates"


def environment() -> Environment:
    """Templates with autoescape on; an unknown name is an error, not a blank."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def policy(script: str | None = None) -> str:
    """A page's content security policy: no network, and of scripts this one alone, by its hash."""
    rules = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    if script is None:
        return rules
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"{rules}; script-src 'sha256-{digest}'"
