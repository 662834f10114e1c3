"""Every code block of the documentation is run as it is written, or says why not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documents import COMMAND, ROOT, RUN, SHOWN, Block, before, blocks, outside, patched, run, words
from readers import assumed
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def running(*, long: bool) -> list[Path]:
    """The pages with a block to run, in the suite or only with the long tests."""
    return [page for page in PAGES if any(block.runs and block.long == long for block in blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    for block in blocks(page):
        assert block.language in RUN + SHOWN, f"{block}: a block needs one of the languages {', '.join(RUN + SHOWN)}"
        if block.language in SHOWN:
            wrong = [line for line in block.text.splitlines() if COMMAND.match(line)]
            assert not wrong, f"{block}: a command in a block that is not run: {wrong}"
    hidden = [line for line in outside(page) if line.startswith("    ") and COMMAND.match(line)]
    assert not hidden, f"{name(page)}: commands belong into a fenced block: {hidden}"
    marks = re.findall(r"^ *<!-- (?:not run|run|exit code).*-->$", page.read_text(encoding="utf-8"), re.M)
    assert len(marks) == sum(len(block.marks) for block in blocks(page)), f"{name(page)}: a mark without a block"


@pytest.mark.parametrize("page", running(long=False), ids=name)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(page, [block for block in blocks(page) if block.runs and not block.long], tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_readme_runs_as_pasted_in_a_new_environment(tmp_path: Path) -> None:
    """From `pip install .` in a clone to the last block, in the user's own shell and Python."""
    clone, folder, bin = tmp_path / "clone", tmp_path / "empty", tmp_path / "environment" / "bin"
    folder.mkdir()
    shutil.copytree(ROOT / "cplus", clone / "cplus", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / file, clone)
    subprocess.run([sys.executable, "-m", "venv", str(bin.parent)], check=True)
    (packages,) = bin.parent.glob("lib/python*/site-packages")
    there = [path for path in sys.path if path.endswith("site-packages")]  # what is there need not be fetched again
    (packages / "here.pth").write_text("\n".join(there) + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "CPLUS_CACHE": str(tmp_path / "cache")}
    *rest, install = [block for block in blocks(README) if block.runs]
    assert "pip install ." in install.text
    code = {"python": str, "diff": patched}
    parts = [code[block.language](block.text) for block in rest if block.language in code]
    (folder / "loop.py").write_text("\n".join(parts))
    shell = "".join(block.text for block in rest if block.language == "bash") + "python loop.py\n"
    for commands, place in ((install.text, clone), (shell, folder)):
        command = ["bash", "-ec", commands]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    the_readme(folder)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in running(long=True) if page != README], ids=name)
def test_the_long_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(page, [block for block in blocks(page) if block.runs], tmp_path, monkeypatch)


def follow(page: Path, chosen: list[Block], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run blocks in an empty folder, in order, then look at what they left."""
    monkeypatch.chdir(folder)
    names = assumed(name(page))
    for block in chosen:
        run(block, names)
    CHECKS.get(name(page), lambda _: None)(folder)


def record(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return read


def the_readme(folder: Path) -> None:
    assert (folder / "out" / "receipt.html").is_file()
    figures = record(folder / "out")["figures"]
    assert figures["acquisition"]["percent"] == 100
    assert figures["retention"]["percent"] > 80
    AutoModelForCausalLM.from_pretrained(folder / "out" / "model")


def the_walk_through(folder: Path) -> None:
    records = {job: record(folder / job) for job in ("out", "sft", "again")}
    for one in records.values():  # 3 or 4 epochs of 25, whatever the seed: then every new row is right
        assert one["epochs"] < one["settings"]["epochs"]
        assert one["figures"]["acquisition"]["percent"] == 100
    assert records["out"]["model"]["after"] == records["again"]["model"]["after"]
    kept = {job: one["figures"]["retention"]["percent"] for job, one in records.items()}
    assert kept["out"] > kept["sft"]  # 93.8 and 83.6 % at seed 0


CHECKS: dict[str, Callable[[Path], None]] = {"README.md": the_readme, "docs/tutorial.md": the_walk_through}


def test_the_readme_is_short() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert words(README) <= 1000
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_the_readmes_loops_run_without_the_added_lines() -> None:
    """What a diff starts from is the reader's own script: nothing of ours is in it."""
    for block in blocks(README):
        if block.language == "diff":
            assert "cplus" not in before(block.text)
            compile(before(block.text), str(block), "exec")
