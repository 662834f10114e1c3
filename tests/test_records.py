"""Every stored result of a study is found by its settings, once, and its seal holds; whatever happens to the runner."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cplus.base import files
from cplus.lab import SCALES, STUDIES, runs_of
from cplus.lab.records import RunResult, parse_result, record_name, save_result
from cplus.lab.report import collect
from cplus.lab.runner import finished, queue, save

RESULTS = Path(__file__).parent.parent / "results"
STORED = {
    "desk": (1214, "31a06011b402092cc4507dce235a6231775fd21337251df768e9059a2dcc8ffb"),
    "desk-real": (32, "8b6aac27b8676b26c3150a4f4f32a4137367536e92c164049b2c9c51f81fa82f"),
}
"""The number of stored records and the hash of their names, as they were when each record was a file of its name."""
SMOKE = SCALES["smoke"]
RUNS = runs_of(STUDIES["e08"], SMOKE)


def lines(scale: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each stored line's study and record."""
    for path in (RESULTS / scale).glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield path.stem, json.loads(line)


def seal(record: dict[str, Any]) -> str:
    """The hash of all but the seal itself."""
    unsealed = {name: value for name, value in record.items() if name != "sha256"}
    text = json.dumps(unsealed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("scale", STORED)
def test_every_stored_record_has_the_name_of_its_settings_its_seal_and_the_first_study(scale: str) -> None:
    found, first = list(lines(scale)), dict[Any, str]()
    assert [record["spec"] for _, record in found if seal(record) != record["sha256"]] == []
    places = [(parse_result(record, study).spec, study) for study, record in found]
    names = [record_name(spec) for spec, _ in places]
    assert (len(set(names)), hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()) == STORED[scale]
    assert len(names) == len(set(names))
    for name, study in STUDIES.items():
        first = dict.fromkeys(runs_of(study, SCALES[scale]), name) | first
    assert [(spec, study) for spec, study in places if study != first.get(spec, "other")] == []


def result(number: int) -> RunResult:
    return RunResult(
        spec=RUNS[number], retention=90.0 + number, retention_uncovered=90.0, acquisition=99.0, external={},
        counts={"asked": 8, "new": 8}, cost={}, seconds=1.0, extra_bytes=0,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "smoke"


def content(folder: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in folder.iterdir()}


def test_a_run_is_a_sealed_line_of_the_first_study_that_declares_it(folder: Path) -> None:
    stranger = RunResult(**{**vars(result(0)), "spec": SMOKE.at(seed=77)})
    for each in (result(0), result(1), stranger):
        save(each, folder)
    kept = content(folder)
    assert {name: len(own) for name, own in kept.items()} == {"e08.jsonl": 2, "other.jsonl": 1}
    records = [json.loads(line) for own in kept.values() for line in own]
    assert [seal(record) for record in records] == [record["sha256"] for record in records]
    assert queue(RUNS, folder) == RUNS[2:]
    assert finished(RUNS, folder) == [result(0), result(1)]
    save(result(2), folder)
    assert content(folder)["e08.jsonl"][:2] == kept["e08.jsonl"]


def test_a_kill_while_a_line_is_written_loses_no_other(folder: Path) -> None:
    save(result(0), folder)
    killed = "import os, sys; from pathlib import Path; from cplus.lab import runner; from test_records import result;"
    killed += "os.replace = lambda *_: os._exit(9); runner.save(result(1), Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", killed, str(folder)], cwd=Path(__file__).parent, check=False)
    assert done.returncode == 9
    assert len(list(folder.iterdir())) > 1  # what the killed process left
    assert finished(RUNS, folder) == [result(0)]
    save(result(1), folder)
    assert {name: len(own) for name, own in content(folder).items()} == {"e08.jsonl": 2}


def test_single_files_of_earlier_versions_are_read(folder: Path) -> None:
    save_result(result(0), folder)
    spoiled = save_result(result(1), folder / "runs")
    assert finished(RUNS, folder) == [result(0), result(1)]
    spoiled.write_text(spoiled.read_text()[:-40])
    assert collect(folder).studies["e08"].results == (result(0),)
    with pytest.raises(ValueError, match=rf"{spoiled.name}, line 1: .* does not parse.*; remove this line to repeat"):
        queue(RUNS, folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda line: line[:-9], "expected a JSON object, but it does not parse"),
        (lambda line: line.replace('"retention":91.0', '"retention":99.0'), "altered after it was written"),
        (lambda line: json.dumps(files.sealed({"schema": 99})), "written by another version"),
        (lambda line: json.dumps(files.sealed({"schema": 1, "spec": {"old": 1}})), "expected the fields spec, "),
        (lambda line: "[]", "written by another version"),
    ],
)
def test_a_damaged_line_is_named_by_file_and_number_and_left_out(folder: Path, spoil: Any, message: str) -> None:
    for number in range(3):
        save(result(number), folder)
    path = folder / "e08.jsonl"
    written = path.read_text().splitlines()
    path.write_text("\n".join([written[0], spoil(written[1]), written[2]]) + "\n")
    [said] = collect(folder).refused
    assert said.startswith("e08.jsonl, line 2: ")
    assert message in said
    assert collect(folder).studies["e08"].results == (result(0), result(2))
    assert finished(RUNS[:1], folder) == [result(0)]
    with pytest.raises(ValueError, match=r"e08.jsonl, line 2: .*; remove this line to repeat its run"):
        queue(RUNS, folder)
    path.write_text("\n".join(written[::2]) + "\n")
    assert queue(RUNS, folder) == [RUNS[1], RUNS[3]]
