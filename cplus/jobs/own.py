"""What the base model itself answers: for those who have requests to keep and no record of the answers."""

from __future__ import annotations

from dataclasses import replace

from cplus import files
from cplus.data.examples import Example, fingerprint, from_row, to_row
from cplus.interfaces import Rejected
from cplus.jobs.rows import Group
from cplus.models import Loaded
from cplus.models.gguf import cache_folder
from cplus.probes.label import Label, label
from cplus.probes.local import LocalEngine


def with_own_answers(group: Group, base: Loaded) -> tuple[Group, str]:
    """The group with the base model's greedy answers, kept in the cache, and a sentence that says so.

    A request that the model does not answer to an end is left out: where it would have stopped is not known.
    """
    key = files.fingerprint([base.fingerprint, group.interface.name, fingerprint(group.examples)])
    path = cache_folder() / "answers" / f"own-{key[:24]}.json"
    if not path.is_file():
        files.write_json(path, [None if own is None else to_row(own) for own in _answered(group, base)])
    rows = [row for row in files.read_json(path) if row is not None]
    if not rows:
        raise ValueError(
            f"the model answers none of the {len(group.examples)} {group.name} rows to an end; give others"
        )
    examples = tuple(from_row(row, where=f"{path}: {row['id']}", id=row["id"]) for row in rows)
    lost = len(group.examples) - len(examples)
    said = f"The {group.name} rows hold the base model's own answers" + (
        f"; {lost} without an end are left out" * bool(lost)
    )
    return replace(group, examples=examples), f"{said}."


def _answered(group: Group, base: Loaded) -> list[Example | None]:
    engine = LocalEngine(base.model, base.tokenizer)
    labels: list[Label | Rejected] = label(base.model, engine, group.interface, group.examples)
    return [own.example if isinstance(own, Label) else None for own in labels]
