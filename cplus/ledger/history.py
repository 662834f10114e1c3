"""A ledger in figures: each task's accuracy after each stage, and how long each row stayed right. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from cplus import files
from cplus.evaluation.retention_acquisition import Kind
from cplus.evaluation.sequences import average_accuracy, backward_transfer, lifetime, survival
from cplus.ledger.chain import Ledger, StageFolder
from cplus.receipts.receipt import RowSet, read_receipt

BASE = "base"
"""The rows on which the base model is evaluated; they are not a task of the sequence."""
Table = Mapping[str, Mapping[str, Kind]]
"""The outcome of each row in one stage, by set and row id."""


def set_name(stage: int) -> str:
    """The name of a task's rows in the flips: the stage that learned them, because task names may repeat.

    >>> set_name(2)
    'stage 2'
    """
    return f"stage {stage}"


def answered(place: StageFolder, new: str, kept: str, external: Sequence[str]) -> dict[str, RowSet]:
    """The row sets of a finished job's receipt under the ledger's names.

    The ledger's own external sets come first; sets that the user added are omitted.
    """
    sets = read_receipt(place.job).sets
    others = [group for group in sets if group.kind == "external"]
    own = {"acquisition": new, "retention": kept}
    named = {own[group.kind]: group for group in sets if group.kind in own}
    return named | dict(zip(external, others, strict=False))


def flips(sets: Mapping[str, RowSet]) -> Table:
    """The outcome of each row, by set; rows without a judgement are omitted."""
    return {name: {row.id: row.kind for row in group.rows if row.kind is not None} for name, group in sets.items()}


def was_right(kind: Kind) -> bool:
    """Whether the row was right before the stage."""
    return kind in ("kept", "lost")


def is_right(kind: Kind) -> bool:
    """Whether the row was right after the stage."""
    return kind in ("kept", "gained")


def tables(ledger: Ledger) -> list[Table]:
    """The flips of every stage."""
    return [files.read_json(ledger.place(entry.stage).flips) for entry in ledger.entries]


def matrix(found: list[Table]) -> list[list[float | None]]:
    """Accuracy by stage (the base model first) and task; None if a task was not evaluated.

    A task is also evaluated just before its own stage, which gives its accuracy for the previous stage.
    """
    count = len(found)
    cells: list[list[float | None]] = [[None] * count for _ in range(count + 1)]
    for stage, table in enumerate(found, start=1):
        for task in range(1, stage + 1):
            rows = table[set_name(task)]
            cells[stage][task - 1] = _share([is_right(kind) for kind in rows.values()])
            if task == stage:
                cells[stage - 1][task - 1] = _share([was_right(kind) for kind in rows.values()])
    return cells


def histories(found: list[Table]) -> dict[str, dict[str, list[bool]]]:
    """By set and row id, whether the row was right after its own stage and each later one.

    The histories of the base model's rows begin with an additional entry for the base model itself.
    """
    by_set: dict[str, dict[str, list[bool]]] = {}
    for number, table in enumerate(found):
        for name, rows in table.items():
            if name in by_set:
                continue  # its rows were followed from their first stage on
            later = found[number:]
            by_set[name] = {
                id: [was_right(kind)] * (name == BASE) + [is_right(t[name][id]) for t in _evaluating(later, name, id)]
                for id, kind in rows.items()
            }
    return by_set


def _evaluating(found: list[Table], name: str, id: str) -> list[Table]:
    """The stages up to the first that did not evaluate the row."""
    return list(takewhile(lambda table: id in table.get(name, {}), found))


def report(ledger: Ledger) -> dict[str, Any]:
    """The ledger's figures as plain JSON values.

    Paper: App. E.9 (average task accuracy).
    """
    found = tables(ledger)
    cells, by_set = matrix(found), histories(found)
    numbers = range(1, len(found) + 1)
    return {
        "ledger": str(ledger.root),
        "head": ledger.head,
        "tasks": [entry.task for entry in ledger.entries],
        "accuracy": cells,
        "average_accuracy": [average_accuracy(cells, number) for number in numbers],
        "backward_transfer": backward_transfer(cells),
        "survival": {
            "all": survival([history for rows in by_set.values() for history in rows.values()]),
            **{name: survival(list(rows.values())) for name, rows in by_set.items()},
        },
        "base": [_share([is_right(k) for k in table[BASE].values()]) if BASE in table else None for table in found],
        "stages": [_stage(ledger, number, by_set) for number in numbers],
    }


def _stage(ledger: Ledger, number: int, by_set: dict[str, dict[str, list[bool]]]) -> dict[str, Any]:
    entry, place = ledger.entries[number - 1], ledger.place(number)
    record = files.read_json(place.record)
    rows = by_set[set_name(number)]
    return {
        "stage": number,
        "task": entry.task,
        "method": record["settings"]["method"],
        "rows": len(rows),
        "acquisition": record["figures"]["acquisition"],
        "retention": record["figures"]["retention"],
        "model": entry.after,
        "created": entry.created,
        "lost": {id: number + age for id, history in rows.items() if (age := lifetime(history)) is not None},
    }


def _share(right: list[bool]) -> float | None:
    return 100 * sum(right) / len(right) if right else None
