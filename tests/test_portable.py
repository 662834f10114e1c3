"""The matrix of `make test-portable`: what a row sets, what is counted, what is not run again, and the page's table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import portable

    return portable


def test_a_row_sets_what_it_says_and_nothing_else(portable: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx512")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)  # a row of the matrix may have set it
    native, default = (portable.ROWS[name].environment() for name in ("native-2", "default-1"))
    assert "ATEN_CPU_CAPABILITY" not in native
    assert (native["OMP_NUM_THREADS"], default["OMP_NUM_THREADS"]) == ("2", "1")
    assert default["ATEN_CPU_CAPABILITY"] == "default"
    assert portable.capability(portable.ROWS["default-1"]) == "DEFAULT"
    assert "OMP_WAIT_POLICY" not in default
    assert native["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.parametrize(("found", "same"), [("AVX2", "native-1"), ("AVX512", None), ("DEFAULT", None)])
def test_a_row_that_allows_all_the_processor_has_repeats_a_native_one(
    portable: Any, found: str, same: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portable, "capability", lambda row: found)
    assert [portable.twin(name) for name in ("avx2-1", "onednn-avx2-1")] == [same, same]
    assert [portable.twin(name) for name in ("native-1", "native-2", "default-1")] == [None] * 3


@pytest.mark.long
def test_a_failure_is_named_and_a_row_that_ended_is_not_run_again(
    portable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "test_asked.py"
    asked.write_text("import os\ndef test_threads():\n    assert os.environ['OMP_NUM_THREADS'] == '1'\n")
    out = tmp_path / "record.json"
    monkeypatch.setattr(portable, "commit", lambda: "abc")
    monkeypatch.setattr(portable, "LOGS", tmp_path / "logs")
    options = ["--tests", str(asked), "--out", str(out), "--only", "native-1", "native-2"]
    monkeypatch.setattr(sys, "argv", ["portable.py", *options])
    assert portable.main() == 1
    rows = json.loads(out.read_text())["rows"]
    assert [(rows[n]["passed"], rows[n]["failed"]) for n in ("native-1", "native-2")] == [(1, 0), (0, 1)]
    assert [name.endswith("test_asked.py::test_threads") for name in rows["native-2"]["failures"]] == [True]
    capsys.readouterr()
    ran: list[Any] = []
    monkeypatch.setattr(portable, "run", lambda row, tests, log: ran.append(row) or {**rows["native-1"], "threads": 2})
    assert portable.main() == 0
    assert ran == [portable.ROWS["native-2"]], "what was green stays, what was red is run again"
    assert "native-1: already there" in capsys.readouterr().out
    monkeypatch.setattr(portable, "commit", lambda: "abd")
    assert portable.main() == 0
    assert len(ran) == 3, "another commit is run anew"


def test_the_page_has_the_table_of_the_record(portable: Any) -> None:
    record = json.loads(portable.OUT.read_text()) if portable.OUT.exists() else {"rows": {}}
    assert portable.between(portable.PAGE.read_text()) == portable.section(record)
    page = f"before {portable.BEGIN}{portable.section({'rows': {}})}{portable.END} after"
    assert portable.between(page) == "\nNot run yet.\n\n"
