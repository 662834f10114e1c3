"""The paper's four sets: counts, hashes, what differs in another source, and a build from the original splits."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cplus.cli import app
from cplus.data import readers
from cplus.data.examples import Choice, fingerprint, lines
from cplus.data.readers import Found, read_file
from cplus.data.tasks import PAPER, load_task
from cplus.lab import paper_sets
from cplus.lab.paper_sets import SPLITS, Difference, PaperSet, at_hand, build, compare, key_of, select

COUNTS = {"csqa": 1096, "arc_c": 1266, "mmlu": 1553, "medqa": 1272}
ROWS = [
    Choice(id=f"csqa-{n:04d}", question=f"Question {n}?", choices=("a", f"b{n}", f"c{n}", "d"), answer=n % 4)
    for n in range(1, 21)
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A set of 20 rows in the place of csqa, a folder with it, and an empty cache."""
    made = PaperSet(rows=tuple(map(key_of, ROWS)), sha256=fingerprint(ROWS))
    monkeypatch.setattr(paper_sets, "paper_sets", lambda: {"csqa": made})
    monkeypatch.setattr("cplus.lab.paper_sets.paper_sets", lambda: {"csqa": made})
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CPLUS_DATA", raising=False)
    (tmp_path / "csqa.jsonl").write_text(lines(ROWS))
    return tmp_path


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app.app, ["study", "data", *arguments])


def test_the_committed_hashes_are_of_as_many_rows_as_the_paper_uses() -> None:
    found = paper_sets.paper_sets()
    assert {name: len(own.rows) for name, own in found.items()} == COUNTS
    assert list(found) == list(PAPER) == list(SPLITS)
    assert all(len(own.sha256) == 64 and len(set(own.rows)) == len(own.rows) for own in found.values())


@pytest.mark.real
def test_the_real_rows_are_verified(data_dir: Path) -> None:
    report = command("verify", "--data-dir", str(data_dir), "--json")
    assert report.exit_code == 0
    assert {each["name"]: each["found"] for each in json.loads(report.stdout)["sets"]} == COUNTS
    rows = read_file(data_dir / "csqa.jsonl")
    assert str(compare("csqa", rows[1:])) == "csqa: 1,095 rows, not the paper's 1,096: 1 missing"


OTHER_OPTIONS = [replace(ROWS[0], choices=own) for own in ((*ROWS[0].choices, "e"), ("A", "b1", "c1", "d"))]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ROWS[3:], "3 missing"),
        ([*ROWS, replace(ROWS[0], id="x", question="Another?")], "1 extra"),
        ([replace(ROWS[0], answer=3), *ROWS[1:]], "1 with another answer"),
        ([OTHER_OPTIONS[0], *ROWS[1:]], "1 with other than 4 options"),
        ([OTHER_OPTIONS[1], *ROWS[1:]], "1 with other options or another spelling"),
        (ROWS[::-1], "in another order"),
    ],
)
def test_one_line_says_what_differs(small: Path, rows: list[Choice], said: str) -> None:
    sentence = f"csqa: {len(rows)} rows, not the paper's 20: {said}"
    assert str(compare("csqa", rows)) == sentence
    (small / "csqa.jsonl").write_text(lines(rows))
    found = command("verify", "csqa", "--data-dir", str(small))
    assert (found.exit_code, len(found.stdout.splitlines())) == (2, 1)
    assert sentence in found.stdout


def original(row: Choice, number: int) -> Choice:
    """The row as the original benchmark has it: one option more, another order, its own id."""
    order = random.Random(number).sample([*row.choices, f"other {number}"], 5)
    return Choice(id=f"hub-{number}", question=f" {row.question}", choices=tuple(order), answer=order.index(row.right))


def test_the_set_is_selected_from_the_original_splits_and_cached(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [replace(row, id=f"more-{i}", question=f"More {i}?") for i, row in enumerate(ROWS)]
    whole = [*map(original, ROWS, range(20)), *others]
    random.Random(0).shuffle(whole)
    halves = {"train": whole[:25], "validation": whole[25:]}

    def read(place: str, *, name: str) -> Found:
        return Found(examples=tuple(halves[place.partition("@")[2]]), detected="")

    monkeypatch.setattr(readers, "read_hub", read)
    assert not at_hand("csqa").same
    assert build("csqa").same
    assert load_task("csqa").fingerprint == fingerprint(ROWS)  # the cached rows are what runs read
    assert str(at_hand("csqa")).startswith("csqa: 20 rows, the paper's (")
    halves = {name: [row for row in own if "Question 7?" not in row.question] for name, own in halves.items()}
    before = (small / "cache" / "data" / "csqa.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"tau/commonsense_qa: csqa: 19 rows, not the paper's 20: 1 missing; nothing"):
        build("csqa")
    assert (small / "cache" / "data" / "csqa.jsonl").read_bytes() == before


def test_a_folder_is_built_listed_and_unknown_names_are_refused(small: Path) -> None:
    assert [row.id for row in select("csqa", ROWS[::-1])] == [row.id for row in ROWS]
    assert "not at hand" in command("list").stdout
    assert json.loads(command("build", "--data-dir", str(small), "--json").stdout)["same"]
    assert fingerprint(ROWS) in command("list").stdout
    assert "expected some of csqa, got 'cqsa'" in str(command("build", "cqsa").exception)
    assert Difference(name="csqa", expected=20, found=20).same
