"""The studies' report: every figure and table, byte-identical when repeated, without torch, missing runs marked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browser, executable
from typer.testing import CliRunner

from cplus.base.locks import holding
from cplus.cli import app
from cplus.evaluation.statistics import Estimate
from cplus.lab import SCALES, STUDIES, runner, runs_of
from cplus.lab.drawing import draw, line, panels
from cplus.lab.report import collect, fig_method_overview, tab_experiment_index
from cplus.methods.table import METHODS

ROOT = Path(__file__).parent.parent
SMOKE = SCALES["smoke"]
DRAWINGS = {make.__name__: make for study in STUDIES.values() for make in study.figures}
DRAWINGS["fig_method_overview"] = fig_method_overview
TABULARS = {make.__name__: make for study in STUDIES.values() for make in study.tables}
TABULARS["tab_experiment_index"] = tab_experiment_index
HOSTILE = "<script>document.title = 'in'</script>"
# The labels of the paper's figures and tables, in the order of its source.
ITEMS = (ROOT / "tests" / "data" / "paper_items.txt").read_text().splitlines()
LABELS = [item.split(": ")[1] for item in ITEMS if not item.startswith("App.")]


SHOWN = [name for name in STUDIES if name not in ("chat", "facts")]
NOT_SMOKE = {"fig_chat", "tab_chat", "tab_facts"}
"""Real models are not part of the scale; tests/test_freeform_runs.py and tests/test_facts.py draw them."""


@pytest.fixture(scope="module")
def results(smoke_results: tuple[Path, Path]) -> Path:
    """All studies' results at smoke scale."""
    return smoke_results[0] / "smoke"


@pytest.fixture(scope="module")
def report(results: Path) -> Path:
    """The report, written by a process in which torch cannot be imported; test processes share one."""
    out = results.parent.with_name("smoke-report")
    code = "import sys; sys.modules['torch'] = None; sys.argv[0] = 'cplus'; from cplus.cli.app import main; main()"
    line = [sys.executable, "-c", code, "study", "report", "--results", str(results), "--out", str(out), "--json"]
    with holding(out.with_suffix(".lock"), wait=280):
        if not (out / "said.json").exists():
            done = subprocess.run(line, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            (out / "said.json").write_text(done.stdout)
    return out


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page without the studies' figures, for a test that does not need them."""
    for name, study in STUDIES.items():
        monkeypatch.setitem(STUDIES, name, replace(study, figures=()))


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app.app, ["study", "report", *arguments])


def test_every_figure_and_table_of_the_paper_has_its_function_in_the_file_of_its_study() -> None:
    added = "fig_answer_prior fig_rotating_evidence fig_gentle_start fig_topic_cue tab_bank_audit fig_frontier"
    added += " tab_frontier fig_chat tab_chat tab_facts"
    paper = {label.replace(":", "_").replace("-", "_") for label in LABELS}
    assert paper | set(added.split()) == set(DRAWINGS) | set(TABULARS)
    text = (ROOT / "docs" / "paper_map.md").read_text()
    assert all(f"`{name}`" in text for name in (*DRAWINGS, *TABULARS))
    for name, study in STUDIES.items():
        module = import_module(f"cplus.lab.{name}")
        functions = [getattr(module, each) for each in vars(module) if each.startswith(("fig_", "tab_"))]
        assert set(functions) == {*study.figures, *study.tables}
        own = [row for row in text.splitlines() if f"| `cplus/lab/{name}.py` " in row]
        assert all(any(f"`{make.__name__}`" in row for row in own) for make in functions)


def test_numbers_are_those_of_the_paper(results: Path, tmp_path: Path) -> None:
    kinds = {"fig": "Fig.", "tab": "Table"}
    numbers = {
        label: f"{word} {n}"
        for kind, word in kinds.items()
        for n, label in enumerate((label for label in LABELS if label.startswith(kind)), start=1)
    }
    found, rows = collect(results), (ROOT / "docs" / "paper_map.md").read_text().splitlines()
    for name, make in TABULARS.items():
        if name in NOT_SMOKE:
            continue
        table = make(found)
        if table.label not in numbers:
            assert table.paper == ("App. C.2" if name == "tab_bank_audit" else "Added here")
            continue
        assert table.paper == numbers[table.label]
        assert any(row.startswith(f"| {table.paper} |") and f"`{name}` |" in row for row in rows)
    for name, make in DRAWINGS.items():
        label = name.replace("fig_", "fig:").replace("_", "-")
        if label in numbers:
            assert f"Paper: {numbers[label]}." in (make.__doc__ or "")
            assert any(row.startswith(f"| {numbers[label]} |") and f"`{name}` |" in row for row in rows)
    cited = dict.fromkeys(("probe-replay", "anchor-probe-replay"), "fig:self-probe-role-anchor-scale")
    cited |= dict.fromkeys(("cplus-anchors", "cplus-probes", "cplus-norm-aligned"), "tab:cplus-ablation")
    cited |= dict.fromkeys(("cplus-no-ema", "cplus-cvar"), "tab:ema-selection")
    assert [name for name, label in cited.items() if numbers[label] not in METHODS[name].paper.split("; ")] == []


@pytest.mark.parametrize("name", ["fig_main_results", "fig_method_overview"])
def test_a_figure_is_drawn_again_byte_for_byte(results: Path, report: Path, tmp_path: Path, name: str) -> None:
    picture, paths = draw(DRAWINGS[name], collect(results), tmp_path)
    assert picture.label.replace(":", "_").replace("-", "_") == name
    for path in paths:
        assert path.read_bytes() == (report / "figures" / path.name).read_bytes(), path.name
    assert b"<dc:date>" not in paths[0].read_bytes()
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    if name != "fig_method_overview":
        assert re.search(r"n = 1( seed)?\b", picture.caption)


@pytest.mark.long
def test_the_page_is_the_same_again_and_speaks_of_every_study(results: Path, report: Path, tmp_path: Path) -> None:
    said = json.loads((report / "said.json").read_text())
    assert set(said["studies"]) == set(SHOWN)
    assert (said["refused"], said["scale"]) == ([], "smoke")
    assert len(said["figures"]) == 2 * len(DRAWINGS.keys() - NOT_SMOKE)
    assert all((report / file).is_file() for file in said["figures"])
    assert command("--results", str(results), "--out", str(tmp_path)).exit_code == 0
    page = (report / "index.html").read_text()
    assert (tmp_path / "index.html").read_text() == page
    for name, study in ((name, STUDIES[name]) for name in SHOWN):
        own = said["studies"][name]
        assert own["answer"] == study.summary(runner.finished(runs_of(study, SMOKE), results)).answer
        assert own["there"] == own["runs"] == len(runs_of(study, SMOKE))
        assert f"cplus study {name} --scale smoke" in page
    assert said["verdict"] in page.replace("&#39;", "'")
    assert page.count('data-name="claimed in">our own<') == sum(
        claim["paper"] is None for own in said["studies"].values() for claim in own["claims"]
    )
    assert "Traceback" not in page


@pytest.mark.usefixtures("undrawn")
def test_what_was_not_run_says_so_and_text_of_a_record_is_escaped(results: Path, tmp_path: Path) -> None:
    folder, [spec, *_] = tmp_path / "smoke", runs_of(STUDIES["e08"], SMOKE)
    [result] = runner.finished([spec], results)
    runner.save(replace(result, environment={**result.environment, "machine": HOSTILE}), folder)
    runner.save(replace(result, spec=SMOKE.at(seed=77)), folder)
    record = json.loads(command("--results", str(folder), "--out", str(tmp_path / "out"), "--json").stdout)
    assert record["studies"]["e05"]["verdict"] == "not run"
    assert record["studies"]["e08"]["there"] == 1
    assert record["unknown_records"] == 1
    [stress] = [make(collect(folder)) for make in STUDIES["e08"].tables]
    cells = [cell for row in stress.rows for cell in row if not isinstance(cell, str)]
    assert [cell.measured for cell in cells].count("not run") == 9
    assert all(cell.published for cell in cells)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "not run" in page
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def test_wrong_folders_are_refused_with_a_way_out(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "desk"):
        found = command("--results", str(folder), "--out", str(tmp_path / "out"))
        assert "named after their scale" in str(found.exception)
    (tmp_path / "desk").mkdir()
    assert "no result of scale desk" in str(command("--results", str(tmp_path / "desk")).exception)
    assert "only one of --readme and --json" in str(command("--readme", "--json").exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scale", ["desk", "desk-real"])
def test_every_table_of_the_committed_results_is_made(scale: str) -> None:
    found = collect(ROOT / "results" / scale)
    made = [make(found) for own in found.studies.values() for make in own.study.tables]
    assert all(len(row) == len(table.columns) for table in made for row in table.rows)


def test_error_bars_are_standard_errors() -> None:
    _, (axis,) = panels(1)
    line(axis, [(4, Estimate(80.0, 1.5, 5)), (8, Estimate(85.0, None, 1))], "CPLUS", "#0072B2", "o")
    [bars] = axis.containers[0].lines[2]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[78.5, 81.5], [85.0, 85.0]]


def test_the_summary_has_a_line_for_every_study(results: Path) -> None:
    lines = command("--results", str(results), "--readme").stdout.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in (*SHOWN, "all")]
    assert "of the paper's comparisons hold" in lines[-1]
    assert "of our own" in lines[-1]
    assert {len(re.split(r"(?<!\\)\|", line)) for line in lines} == {7}


@pytest.fixture(scope="module")
def page(report: Path) -> Iterator[Browser]:
    if executable() is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with browser() as opened:
        opened.size(1200, 900)
        opened.open(report / "index.html")
        yield opened


@pytest.mark.browser
def test_the_page_opens_without_complaint_and_asks_for_nothing(page: Browser, report: Path) -> None:
    assert page.complaints() == []
    asked = [address for address in page.requests() if not address.startswith("data:")]
    assert asked == [(report / "index.html").resolve().as_uri()]
    assert page.js("[...document.querySelectorAll('section.study')].map(e => e.id)") == [*SHOWN, "index"]
    answers = "[...document.querySelectorAll('section.study .answer')].filter(e => e.innerText).length"
    assert page.js(answers) == len(SHOWN)
    heights = page.js("[...document.querySelectorAll('figure svg')].map(e => e.getBoundingClientRect().height)")
    assert len(heights) == len(DRAWINGS.keys() - NOT_SMOKE)
    assert min(heights) >= 100
    ids = page.js("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    links = page.js("[...document.querySelectorAll('nav a')].map(e => e.getAttribute('href').slice(1))")
    assert set(links) <= set(ids)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_on_a_phone_and_in_the_dark(page: Browser, scheme: str) -> None:
    page.media(scheme=scheme)
    page.size(360, 740, mobile=True)
    assert page.js("document.documentElement.scrollWidth") == 360
    ground = page.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(ground) < 60) == (scheme == "dark")
    inks = "[...document.querySelectorAll('figure svg *')].map(e => getComputedStyle(e).fill)"
    assert ("rgb(228, 232, 238)" in page.js(inks)) == (scheme == "dark")
    page.size(1200, 900)
    page.media()
