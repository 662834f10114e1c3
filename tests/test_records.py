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
from cplus.lab.runner import files_in, fold, load, queue, save, stored

RESULTS = Path(__file__).parent.parent / "results"
STORED = {
    "desk": (1214, "31a06011b402092cc4507dce235a6231775fd21337251df768e9059a2dcc8ffb"),
    "desk-real": (49, "70478b48c4b1008db2c9c96ce81beb67ec86f283defbee0c8461a472f68fd6f7"),
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
def test_every_stored_record_has_the_name_of_its_settings_and_its_seal(scale: str) -> None:
    found = list(lines(scale))
    assert [record["spec"] for _, record in found if seal(record) != record["sha256"]] == []
    names = [record_name(parse_result(record, study).spec) for study, record in found]
    assert (len(set(names)), hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()) == STORED[scale]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("scale", STORED)
def test_a_run_of_several_studies_is_stored_with_the_first(scale: str) -> None:
    first = {}
    for name, study in STUDIES.items():
        first = dict.fromkeys(runs_of(study, SCALES[scale]), name) | first
    places = {parse_result(record, study).spec: study for study, record in lines(scale)}
    assert {spec: study for spec, study in places.items() if study != first.get(spec, "other")} == {}


def result(number: int) -> RunResult:
    return RunResult(
        spec=RUNS[number], retention=90.0 + number, retention_uncovered=90.0, acquisition=99.0, external={},
        counts={"asked": 8, "new": 8}, cost={}, seconds=1.0, extra_bytes=0,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "smoke"


def content(folder: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in folder.glob("*.jsonl")}


def test_finished_runs_move_to_the_file_of_their_study(folder: Path) -> None:
    stranger = RunResult(**{**vars(result(0)), "spec": SMOKE.at(seed=77)})
    before = [json.loads(save(each, folder).read_text()) for each in (result(0), result(1), stranger)]
    fold(folder)
    kept = content(folder)
    assert {name: len(own) for name, own in kept.items()} == {"e08.jsonl": 2, "other.jsonl": 1}
    assert sorted(map(seal, before)) == sorted(json.loads(line)["sha256"] for own in kept.values() for line in own)
    assert files_in(folder) == []
    assert queue(RUNS, folder) == RUNS[2:]
    assert load(RUNS[1], folder) == result(1)
    save(result(2), folder)
    fold(folder)
    assert content(folder)["e08.jsonl"][:2] == kept["e08.jsonl"]
    assert load(RUNS[2], folder) == result(2)


def test_a_kill_between_line_and_file_neither_loses_nor_doubles_a_record(folder: Path) -> None:
    for number in (0, 1):
        save(result(number), folder)
    killed = "import os, sys; from pathlib import Path; from cplus.lab.runner import fold;"
    killed += "Path.unlink = lambda path, **_: os._exit(9) if path.suffix == '.json' else None; fold(Path(sys.argv[1]))"
    assert subprocess.run([sys.executable, "-c", killed, str(folder)], check=False).returncode == 9
    assert len(content(folder)["e08.jsonl"]) == len(files_in(folder)) == 2
    assert queue(RUNS, folder) == RUNS[2:]
    fold(folder)
    assert (len(content(folder)["e08.jsonl"]), files_in(folder)) == (2, [])
    assert stored(folder) == ({RUNS[0]: result(0), RUNS[1]: result(1)}, [])


def test_single_files_of_earlier_versions_are_read_and_moved(folder: Path) -> None:
    save_result(result(0), folder)
    spoiled = save_result(result(1), folder)
    spoiled.write_text(spoiled.read_text()[:-40])
    assert load(RUNS[0], folder) == result(0)
    assert collect(folder).studies["e08"].results == (result(0),)
    fold(folder)
    assert files_in(folder) == [spoiled]
    with pytest.raises(ValueError, match=rf"{spoiled.name}: .* does not parse.*; move it away to repeat the run"):
        load(RUNS[1], folder)
    assert collect(folder).studies["e08"].results == (result(0),)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda line: line[:-9], "expected a JSON object, but it does not parse"),
        (lambda line: line.replace('"retention":91.0', '"retention":99.0'), "altered after it was written"),
        (lambda line: json.dumps(files.sealed({"schema": 99})), "written by another version"),
        (lambda line: "[]", "written by another version"),
    ],
)
def test_a_damaged_line_is_named_by_file_and_number_and_left_out(folder: Path, spoil: Any, message: str) -> None:
    for number in range(3):
        save(result(number), folder)
    fold(folder)
    path = folder / "e08.jsonl"
    written = path.read_text().splitlines()
    [at] = [number for number, line in enumerate(written) if json.loads(line)["retention"] == 91.0]
    written[at] = spoil(written[at])
    path.write_text("\n".join(written) + "\n")
    [said] = collect(folder).refused
    assert said.startswith(f"e08.jsonl, line {at + 1}: ")
    assert message in said
    assert collect(folder).studies["e08"].results == (result(0), result(2))
    assert load(RUNS[0], folder) == result(0)
    with pytest.raises(ValueError, match=rf"e08.jsonl, line {at + 1}: .*; remove this line to repeat its run"):
        queue(RUNS, folder)
    path.write_text("\n".join(written[:at] + written[at + 1 :]) + "\n")
    assert queue(RUNS, folder) == [RUNS[1], RUNS[3]]
