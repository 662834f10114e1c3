"""What the base model itself answers: for those who have requests to keep and no record of the answers."""

from __future__ import annotations

from collections.abc import Sequence

from cplus import files
from cplus.data.examples import Example, fingerprint, from_row, to_row
from cplus.files import cache_folder
from cplus.interfaces import Interface, Rejected
from cplus.models import Loaded
from cplus.probes.label import Label, label
from cplus.probes.local import LocalEngine


def own_answers(base: Loaded, interface: Interface, examples: Sequence[Example], *, name: str) -> tuple[Example, ...]:
    """The rows with the base model's greedy answers for responses, kept in the cache; `name` is theirs in errors.

    A request that the model does not answer to an end is left out: where it would have stopped is not known.
    """
    # The first prompt's tokens stand for the form of asking, a chat or plain text.
    asked = list(interface.prompt(examples[0]))
    key = files.fingerprint([base.fingerprint, interface.name, asked, fingerprint(examples)])
    path = cache_folder() / "answers" / f"own-{key[:24]}.json"
    if not path.is_file():
        files.write_json(path, [None if own is None else to_row(own) for own in _answered(base, interface, examples)])
    rows = [row for row in files.read_json(path) if row is not None]
    if not rows:
        raise ValueError(f"the model answers none of the {len(examples)} {name} rows to an end; give others")
    return tuple(from_row(row, where=f"{path}: {row['id']}", id=row["id"]) for row in rows)


def _answered(base: Loaded, interface: Interface, examples: Sequence[Example]) -> list[Example | None]:
    engine = LocalEngine(base.model, base.tokenizer)
    labels: list[Label | Rejected] = label(base.model, engine, interface, examples)
    return [own.example if isinstance(own, Label) else None for own in labels]
