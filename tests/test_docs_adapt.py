"""The walk-through of docs/adapt.md works as it is written."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from cplus.cli import app, register
from cplus.job.settings import AdaptConfig

PAGE = (Path(__file__).parent.parent / "docs" / "adapt.md").read_text()

if not app.registered_commands:
    register()


def test_the_walk_through_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    section = PAGE.split("## Walk-through")[1].split("\n## ")[0]
    blocks = re.findall(r"```(python|bash)\n(.*?)```", section, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "bash", "bash", "python", "python"]
    for kind, text in blocks:
        if kind == "python":
            exec(compile(text, "docs/adapt.md", "exec"), {})
            continue
        for line in text.splitlines():
            run = CliRunner().invoke(app, shlex.split(line)[1:])
            assert run.exit_code == 0, run.output
    records = {name: json.loads((tmp_path / name / "record.json").read_text()) for name in ("out", "sft", "again")}
    for record in records.values():  # 3 or 4 epochs of 25, whatever the seed: then every new row is right
        assert record["epochs"] < record["settings"]["epochs"]
        assert record["figures"]["acquisition"]["percent"] == 100
    assert records["out"]["model"]["after"] == records["again"]["model"]["after"]
    kept = {name: record["figures"]["retention"]["percent"] for name, record in records.items()}
    assert kept["out"] > kept["sft"] + 5  # over five seeds and two kinds of arithmetic 16 to 19.5 points


def test_the_readmes_walk_through_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parent.parent
    shutil.copytree(root / "examples" / "rows", tmp_path / "examples" / "rows")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    section = (root / "README.md").read_text().split("## From your JSONL to a receipt")[1].split("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    for line in block.splitlines():
        run = CliRunner().invoke(app, shlex.split(line)[1:])
        assert run.exit_code == 0, run.output
    assert (tmp_path / "out" / "receipt.html").is_file()
    figures = json.loads((tmp_path / "out" / "record.json").read_text())["figures"]
    assert figures["acquisition"]["percent"] == 100
    assert figures["retention"]["percent"] > 80
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")


def test_every_option_the_page_names_exists() -> None:
    known = {name.replace("_", "-") for name in AdaptConfig.model_fields} | {
        "config",
        "resume",
        "finish",
        "validate",
        "force",
        "plan",
        "json",
    }
    named = set(re.findall(r"--([a-z][a-z-]+)", PAGE)) - {"example", "schema"}
    assert named <= known
