"""A job's rows to keep with the base model's own answers."""

from __future__ import annotations

from dataclasses import replace

from cplus.job.rows import Group
from cplus.models import Loaded
from cplus.probes.own_answers import own_answers


def with_own_answers(group: Group, base: Loaded) -> tuple[Group, str]:
    """The group with the base model's greedy answers, kept in the cache, and a sentence that says so."""
    examples = own_answers(base, group.interface, group.examples, name=group.name)
    lost = len(group.examples) - len(examples)
    said = f"The {group.name} rows hold the base model's own answers" + (
        f"; {lost} without an end are left out" * bool(lost)
    )
    return replace(group, examples=examples), f"{said}."
