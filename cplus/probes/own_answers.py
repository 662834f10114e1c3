"""The base model's own answers, for users who have requests to preserve but no recorded answers."""

from __future__ import annotations

from collections.abc import Sequence

from cplus import files
from cplus.data.examples import Example, fingerprint, from_row, to_row
from cplus.files import cache_folder
from cplus.interfaces import Interface, Rejected
from cplus.models import Loaded
from cplus.probes.label import MAX_ANSWER_TOKENS, Label, label
from cplus.probes.local import LocalEngine

LONGER = 4
"""How many times the usual limit an answer may have that did not end within it, if the model's window admits it."""


def own_answers(base: Loaded, interface: Interface, examples: Sequence[Example], *, name: str) -> tuple[Example, ...]:
    """The rows with the base model's greedy answers as responses, cached on disk; errors call the rows `name`.

    A row whose answer reaches the token limit is omitted: its end is not known.
    """
    # The tokens of the first prompt identify the prompt format, chat or plain text.
    prompt = list(interface.prompt(examples[0]))
    key = files.fingerprint([base.fingerprint, interface.name, prompt, fingerprint(examples)])
    path = cache_folder() / "answers" / f"own-{key[:24]}.json"
    if not path.is_file():
        files.write_json(path, [None if own is None else to_row(own) for own in _answered(base, interface, examples)])
    rows = [row for row in files.read_json(path) if row is not None]
    if not rows:
        raise ValueError(
            f"none of the {len(examples)} {name} rows was answered before the token limit; supply other rows"
        )
    return tuple(from_row(row, where=f"{path}: {row['id']}", id=row["id"]) for row in rows)


def _answered(base: Loaded, interface: Interface, examples: Sequence[Example]) -> list[Example | None]:
    engine = LocalEngine(base.model, base.tokenizer)
    labels: list[Label | Rejected] = label(base.model, engine, interface, examples)
    open_ended = [i for i, own in enumerate(labels) if isinstance(own, Rejected) and own.reason == "answer without end"]
    longest = max((len(interface.prompt(examples[i])) for i in open_ended), default=0)
    limit = min(LONGER * MAX_ANSWER_TOKENS[interface.name], base.window - longest)
    again = label(base.model, engine, interface, [examples[i] for i in open_ended], max_tokens=limit)
    for i, own in zip(open_ended, again, strict=True):
        labels[i] = own
    return [own.example if isinstance(own, Label) else None for own in labels]
