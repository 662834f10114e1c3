"""What `docs/safety.md` claims: text is never markup, a path or code, and nothing is loaded that could run."""

from __future__ import annotations

import ast
import dataclasses
import json
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from receipts import full
from toyjob import asked, write_files
from typer.testing import CliRunner

import cplus
from cplus import models
from cplus.base import files, terminal
from cplus.cli.app import app
from cplus.core.evidence import MeanGradient
from cplus.core.guard import Guard
from cplus.distributed import checkpoint
from cplus.jobs.adapt import resume
from cplus.jobs.settings import AdaptConfig
from cplus.receipts.page import environment, render, to_json
from cplus.training import sharding
from cplus.training.sharding import Held

PACKAGE = Path(cplus.__file__).parent
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x1b[2J\x1b]0;t\x07\u202e../../etc/passwd"


@cache
def calls() -> list[tuple[Path, ast.Call, str]]:
    """Every call in the package, with its dotted name."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                found.append((path, node, ast.unparse(node.func)))
    return found


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), None)


# Text


def test_text_in_a_page_is_text() -> None:
    record = to_json(dataclasses.replace(full(), title=HOSTILE, notes=(HOSTILE,)))
    page = render(record)
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert environment().autoescape is True
    templates = [path.read_text() for path in (PACKAGE / "receipts" / "templates").glob("*.html")]
    assert templates
    assert not [text for text in templates if "| safe" in text or "|safe" in text or "autoescape false" in text]


def test_text_in_a_terminal_moves_no_cursor_and_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    shown = terminal.clean(HOSTILE)
    assert not any(character in shown for character in "\x1b\x07\u202e")
    with terminal.progress() as bars:
        bars.add_task("[/no-such-tag] rows.jsonl")
        bars.refresh()
        for column in bars.columns:
            column(bars.tasks[0])  # a name in brackets is no markup that could fail


def test_names_of_rows_reach_no_path_and_an_altered_record_has_no_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    write_files(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines()]
    rows = [{**row, "id": f"../../../escape-{i}"} for i, row in enumerate(rows)]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = cplus.adapt(asked(tmp_path, epochs=1, evaluate_every=0))
    assert not [path for path in tmp_path.rglob("*") if "escape" in path.name]
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "out", "new.jsonl", "keep.jsonl", "past.jsonl"}
    assert resume(done.folder).record == done.record
    path = done.folder / "record.json"
    path.write_text(path.read_text().replace('"steps": 3', '"steps": 4'))
    with pytest.raises(ValueError, match="altered after it was written"):
        resume(done.folder)


# Code


def test_pickles_are_only_read_as_weights_and_remote_code_is_off() -> None:
    loads = [(path, call) for path, call, name in calls() if name == "torch.load"]
    assert loads
    assert all(keyword(call, "weights_only") == "True" for _, call in loads)
    names = {name for _, _, name in calls()}
    assert not names & {"pickle.load", "pickle.loads", "eval", "exec", "yaml.load", "os.system", "marshal.loads"}
    assert "True" not in [keyword(call, "trust_remote_code") for _, call, _ in calls()]
    assert AdaptConfig.model_fields["trust_remote_code"].default is False
    shells = [call for _, call, name in calls() if name.startswith("subprocess.") and keyword(call, "shell")]
    assert not shells


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    from fuzzing import _State

    from cplus.jobs.checkpoint import Checkpoints

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"format": "cplus-checkpoint/2", "state": Bomb()}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="a complete file, but it cannot be read"):
        Checkpoints(tmp_path / "checkpoint.pt", "identity", minutes=1, steps=1).load(_State())  # type: ignore[arg-type]
    assert not (tmp_path / "ran").exists()


def bomb(marker: Path) -> bytes:
    """A pickle of names in torch's checkpoint modules alone: `dataclass` compiles the names of a class's fields."""

    class Left:
        def __reduce__(self) -> Any:
            return dataclasses.field, (), (None, {"init": False})  # else its name would have to be a valid one

    name = f"x=open({str(marker)!r}, 'w'), *"
    state = pickle.dumps((None, {"__annotations__": {name: 0}, name: Left()}), protocol=0)[:-1]
    raw = b"cdataclasses\ndataclass\n(cdataclasses\nStorageMeta\n" + state + b"btR."
    return raw.replace(b"cdataclasses", b"ctorch.distributed.checkpoint.metadata")


def test_the_metadata_of_shards_runs_no_code(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    guard = Guard(torch.optim.SGD(model.parameters()), model, evidence=MeanGradient(model=model, sources=()))
    checkpoint.save(guard, tmp_path / "guard")
    checkpoint.load(guard, tmp_path / "guard")  # its own is read
    (tmp_path / "guard" / ".metadata").write_bytes(bomb(tmp_path / "ran"))
    with pytest.raises(ValueError, match=r"may not name .*metadata\.dataclass"):
        checkpoint.load(guard, tmp_path / "guard")

    held = Held(weights={}, optimized=(), guarded=())
    hashes = sharding.write(tmp_path / "job", {"guard": None}, held)
    assert sharding.read(tmp_path / "job", hashes, held) == {"guard": None}
    (tmp_path / "job" / ".metadata").write_bytes(bomb(tmp_path / "ran"))
    hashes[".metadata"] = files.sha256_file(tmp_path / "job" / ".metadata")  # as a hostile sender would
    with pytest.raises(ValueError, match=r"may not name .*metadata\.dataclass"):
        sharding.read(tmp_path / "job", hashes, held)
    assert not (tmp_path / "ran").exists()


def test_weights_come_from_safetensors_alone(tmp_path: Path, make_tiny: Any) -> None:
    tiny = make_tiny("llama")
    models.save(tiny.model, tiny.tokenizer, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save(tiny.model.state_dict(), tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="could not load"):
        models.load(tmp_path / "m", device="cpu")


@pytest.mark.parametrize(
    ("command", "name", "value", "option"),
    [
        ("adapt --resume", "method", "python:hostile:ROW", "--set method=python:hostile:ROW"),
        ("adapt --finish", "judge", "python:hostile:function", "--set judge=python:hostile:function"),
        ("adapt --finish", "trust_remote_code", True, "--set trust_remote_code=true"),
        ("repair --resume", "trust_remote_code", True, "--set trust_remote_code=true"),
    ],
)
def test_what_a_folders_settings_would_run_must_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, value: Any, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile.py").write_text("open('ran', 'w')\n")
    write_files(tmp_path)
    values = {**asked(tmp_path).model_dump(mode="json"), name: value}
    kind = "cplus-repair/1" if command.startswith("repair") else "cplus-job/1"
    files.write_json(tmp_path / "out" / "settings.json", {"format": kind, "settings": values})
    refused = CliRunner().invoke(app, [*command.split(), "out"])
    assert isinstance(refused.exception, ValueError)
    assert f"add {option} if you trust it" in str(refused.exception)
    assert not (tmp_path / "ran").exists()
    if command == "adapt --finish":
        repeated = CliRunner().invoke(app, [*command.split(), "out", *option.split()])
        assert "nothing was trained yet, so there is nothing to finish" in str(repeated.exception)
        other = CliRunner().invoke(app, [*command.split(), "out", "--method", "sft"])
        assert "expected what can run code to be repeated as it is there, got method sft" in str(other.exception)


# Figures


def test_a_record_says_what_could_change_its_numbers(tmp_path: Path) -> None:
    from cplus.base.environment import environment as stamp

    found = stamp(threads=3, device="cpu")
    assert (found["threads"], found["device"]) == (3, "cpu")
    assert set(found["versions"]) >= {"cplus", "torch", "transformers", "tokenizers", "numpy"}
    assert {"python", "machine", "system", "cores", "commit"} <= set(found)
