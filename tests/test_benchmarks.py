"""The scripts behind published figures still find what they import, and those that need no real model run."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS, TOOLS = (Path(__file__).parent.parent / name for name in ("benchmarks", "tools"))
TOY = ["--model", "toy", "--task", "harbours", "--interface", "cloze"]


@pytest.mark.parametrize("path", [*BENCHMARKS.glob("*.py"), *TOOLS.glob("*.py")], ids=lambda path: path.stem)
def test_what_a_script_imports_of_the_package_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cplus":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "record", "options"),
    [
        ("communication", "communication", []),
        ("generation", "generation", [*TOY, "--requests", "4", "--rounds", "1"]),
        ("ranks", "ranks-time", ["time"]),
    ],
)
def test_a_benchmark_writes_its_record(name: str, record: str, options: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *options, "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads((tmp_path / f"{record}.json").read_text())["environment"]["device"] == "cpu"
