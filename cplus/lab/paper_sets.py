"""The paper's four categorical sets: which rows they hold, as hashes, and how they are selected from a public source.

The rows themselves are not part of this package. `paper_sets.json` has for each row, in order, a hash of its question,
of each option and of its exact text, and the index of the right option; `tools/paper_sets.py` wrote it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from cplus.base import files
from cplus.data import readers
from cplus.data.examples import Choice, Example, fingerprint, lines
from cplus.data.readers import read_file
from cplus.data.tasks import PAPER, cached, folder_of
from cplus.lab.summaries import grouped

QUESTION, OPTION, TEXT = 10, 4, 6
"""Hexadecimal digits of the hashes."""
OPTIONS = 4


@dataclass(frozen=True, kw_only=True)
class RowKey:
    """One row as hashes: the question and the options without regard to blanks and case, and the exact text."""

    question: str
    options: tuple[str, ...]
    answer: int
    text: str

    def packed(self) -> str:
        """The hashes as one word."""
        return f"{self.question}{''.join(self.options)}{self.text}{self.answer}"

    @staticmethod
    def unpacked(word: str) -> RowKey:
        """The hashes of one word."""
        options = [word[QUESTION + OPTION * i : QUESTION + OPTION * (i + 1)] for i in range(OPTIONS)]
        return RowKey(question=word[:QUESTION], options=tuple(options), answer=int(word[-1]), text=word[-TEXT - 1 : -1])


@dataclass(frozen=True, kw_only=True)
class PaperSet:
    """A set: its rows as hashes, in order, and the SHA-256 of its content (`cplus.data.examples.fingerprint`)."""

    rows: tuple[RowKey, ...]
    sha256: str


@cache
def paper_sets() -> Mapping[str, PaperSet]:
    """The four sets by name."""
    raw = json.loads(Path(__file__).with_suffix(".json").read_text())
    return {
        name: PaperSet(rows=tuple(map(RowKey.unpacked, own["rows"].split())), sha256=own["sha256"])
        for name, own in raw.items()
    }


def key_of(example: Choice) -> RowKey:
    """A row as hashes; copies of one benchmark differ in blanks and case."""

    def short(text: str, digits: int) -> str:
        return sha256(text.encode()).hexdigest()[:digits]

    texts = (example.question, *example.choices)
    question, *options = (" ".join(text.split()).casefold() for text in texts)
    return RowKey(
        question=short(question, QUESTION),
        options=tuple(short(option, OPTION) for option in options),
        answer=example.answer,
        text=short("\n".join(texts), TEXT),
    )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What differs between the rows of a source and the paper's set: each kind of difference in words.

    `where` is the file that the rows were read from; `found`, their number, is None where there is no such file.
    """

    name: str
    expected: int
    found: int | None = None
    kinds: tuple[str, ...] = ()
    where: Path | None = None

    @property
    def same(self) -> bool:
        """Whether the rows are the paper's, to the letter and in order."""
        return not self.kinds and self.expected == self.found

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.name}: not at hand; 'cplus study data build {self.name}' selects its rows"
        where = "" if self.where is None else f" ({self.where})"
        said = "the paper's" if self.same else f"not the paper's {self.expected:,}: {', '.join(self.kinds)}"
        return f"{self.name}: {self.found:,} rows, {said}{where}"

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        where = None if self.where is None else str(self.where)
        return {**asdict(self), "sha256": paper_sets()[self.name].sha256, "where": where, "same": self.same}


ANSWER, COUNT = "with another answer", f"with other than {OPTIONS} options"
OTHER = "with other options or another spelling"


def compare(name: str, examples: Sequence[Example]) -> Difference:
    """Hold the rows of a source against the paper's set of this name."""
    wanted = paper_sets()[name]
    whole = Difference(name=name, expected=len(wanted.rows), found=len(examples))
    if fingerprint(examples) == wanted.sha256:
        return whole
    places = _by_question(examples)
    taken: list[int] = []  # in the order of the paper's rows
    counts = dict.fromkeys(("missing", "extra", ANSWER, COUNT, OTHER), 0)
    for key in wanted.rows:
        at = _best(key, places, taken)
        if at is None:
            counts["missing"] += 1
            continue
        index, own = at
        taken.append(index)
        if len(own.options) != OPTIONS:
            counts[COUNT] += 1
        elif set(own.options) == set(key.options) and own.options[own.answer] != key.options[key.answer]:
            counts[ANSWER] += 1
        elif own != key:
            counts[OTHER] += 1
    counts["extra"] = len(examples) - len(taken)
    kinds = [f"{count:,} {what}" for what, count in counts.items() if count]
    return replace(whole, kinds=(*kinds, *(["in another order"] if taken != sorted(taken) else [])))


def _by_question(examples: Iterable[Example]) -> dict[str, list[tuple[int, RowKey]]]:
    pairs = ((index, key_of(example)) for index, example in enumerate(examples) if isinstance(example, Choice))
    return grouped(pairs, lambda pair: pair[1].question)


def _best(
    key: RowKey, places: Mapping[str, Sequence[tuple[int, RowKey]]], taken: Collection[int]
) -> tuple[int, RowKey] | None:
    """Of the rows with this question that are not taken, the one that shares most with the key."""

    def likeness(pair: tuple[int, RowKey]) -> tuple[int, bool, bool]:
        own = pair[1]
        return len(set(own.options) & set(key.options)), own.text == key.text, own.answer == key.answer

    return max((pair for pair in places.get(key.question, ()) if pair[0] not in taken), key=likeness, default=None)


def select(name: str, examples: Sequence[Example]) -> list[Choice]:
    """The paper's rows among those of a source, with its options and its order; rows that are not there are left out.

    A source may hold more rows, more options and another order of either: the original splits do.
    """
    places, found = _by_question(examples), []
    taken: list[int] = []
    for number, key in enumerate(paper_sets()[name].rows, start=1):
        at = _best(key, places, taken)
        source = None if at is None else examples[at[0]]
        if at is None or not isinstance(source, Choice) or (chosen := _options(key, at[1])) is None:
            continue
        taken.append(at[0])
        texts = tuple(source.choices[i].strip() for i in chosen)
        row_id = f"{name}-{number:04d}"
        answer = next((i for i, at_source in enumerate(chosen) if at_source == source.answer), key.answer)
        found.append(Choice(id=row_id, question=source.question.strip(), choices=texts, answer=answer))
    return found


def _options(key: RowKey, own: RowKey) -> list[int] | None:
    """Where the key's options are in a source's row, each used once; None if one of them is not there.

    Of options that occur twice, the source's right one takes the place of the key's.
    """
    free, chosen = list(range(len(own.options))), []
    for place, wanted in enumerate(key.options):
        here = [i for i in free if own.options[i] == wanted]
        if not here:
            return None
        others = [i for i in here if i != own.answer]
        chosen.append(others[0] if others and (place != key.answer or own.answer not in here) else own.answer)
        free.remove(chosen[-1])
    return chosen


# The paper's four sets at hand: selected from a folder or the hub, checked, and kept in the cache.


SPLITS: dict[str, tuple[str, ...]] = {
    "csqa": ("train", "validation"),
    "arc_c": ("train", "validation", "test"),
    "mmlu": ("test", "validation", "dev"),
    "medqa": ("train", "test"),
}
"""The splits of the hub's copies that the four sets were drawn from."""


def at_hand(name: str, data_dir: Path | None = None) -> Difference:
    """The rows that a run would read: those of the folder, else those of the cache; the hub is not asked."""
    folder = folder_of(data_dir)
    path = cached(name) if folder is None else folder / f"{name}.jsonl"
    if not path.is_file():
        return Difference(name=name, expected=len(paper_sets()[name].rows))
    return replace(compare(name, read_file(path)), where=path)


def build(name: str, data_dir: Path | None = None) -> Difference:
    """Select the paper's rows from a folder's file or from the hub, check them and write them into the cache.

    Rows that are missing or have another answer or number of options are an error, and nothing is written.
    """
    folder, place, rows = folder_of(data_dir), PAPER[name].partition("@")[0], list[Example]()
    if folder is not None:
        source = str(folder / f"{name}.jsonl")
        rows += read_file(Path(source))
    else:
        source = place.partition(":")[0]
        for split in SPLITS[name]:
            rows += readers.read_hub(f"{place}@{split}", name=f"{name}-{split}").examples
    found = select(name, rows)
    difference = compare(name, found)
    if any(kind.endswith(("missing", ANSWER, COUNT)) for kind in difference.kinds):
        raise ValueError(
            f"{source}: {difference}; nothing was written: give the folder of another copy with --data-dir"
        )
    path = cached(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, lines(found))
    return replace(difference, where=path)
