"""A receipt as the sealed JSON record that its page is rendered from, and back."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cplus import files
from cplus.receipts.contents import Receipt
from cplus.receipts.measures import figures

SCHEMA = 2


def to_json(receipt: Receipt) -> dict[str, Any]:
    """The record as plain values, with the figures its rows give and the hash of it all."""
    _check(receipt)
    body = {"schema": SCHEMA, **asdict(receipt), "figures": figures(receipt)}
    body = json.loads(files.canonical_json(body))  # tuples become lists, as they will be read
    return {**body, "sha256": files.fingerprint(body)}


def from_json(raw: Any, *, where: str = "the receipt") -> Receipt:
    """Read a record made by `to_json`; one that was altered, or that another version wrote, is refused."""
    if not isinstance(raw, Mapping) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, Mapping) else None
        raise ValueError(
            f"{where}: expected a receipt of schema {SCHEMA}, got schema {found!r:.20}: another version wrote it; "
            "make the receipt again with this version"
        )
    body = {key: value for key, value in raw.items() if key != "sha256"}
    if raw.get("sha256") != files.fingerprint(body):
        raise ValueError(
            f"{where}: the record was altered: its content has the hash {files.fingerprint(body)[:16]}, "
            f"but it was written with {str(raw.get('sha256'))[:16]}; make the receipt again"
        )
    fields = {key: value for key, value in body.items() if key not in ("schema", "figures")}
    try:
        receipt = TypeAdapter(Receipt).validate_json(files.canonical_json(fields))
    except ValidationError as error:
        raise ValueError(f"{where}: {_first(error)}") from error
    _check(receipt)
    if not _alike(body["figures"], json.loads(files.canonical_json(figures(receipt)))):
        raise ValueError(f"{where}: its figures do not follow from its rows; make the receipt again")
    return receipt


def _check(receipt: Receipt) -> None:
    """Refuse values that could not be read again, and names and ids that occur twice."""
    try:
        TypeAdapter(Receipt).validate_python(receipt)
    except ValidationError as error:
        raise ValueError(f"the receipt: {_first(error)}") from error
    groups = {"set names": [own.name for own in receipt.sets]}
    groups |= {f"ids in set {own.name!r}": [row.id for row in own.rows] for own in receipt.sets}
    for what, names in groups.items():
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(f"the receipt: expected different {what}, got {twice[0]!r} more than once")


def _alike(left: Any, right: Any) -> bool:
    """Equal, up to what another build of the statistics library may round."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_alike(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
    return bool(left == right)


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.60}"
