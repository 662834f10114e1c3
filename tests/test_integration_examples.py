"""Every example runs. axolotl and LLaMA-Factory pin other versions than ours, so stand-ins take their places."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import toyjob
from trained import trainer

import cplus
from cplus.core.gates import Proposal
from cplus.methods.table import method

Run = Callable[..., dict[str, float]]
EXAMPLES = Path(__file__).parent.parent / "examples"
KEPT = 0.89
"""Of 200 known rows; measured 0.945 to 0.965 with the gate and 0.655 to 0.84 without it."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, float]]]:
    """Import an example from its folder and call its main with these arguments."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def call(name: str, *arguments: str) -> dict[str, float]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        return importlib.import_module(name).main()  # type: ignore[no-any-return]

    yield call
    for name in {path.stem for path in EXAMPLES.glob("*.py")} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.mark.parametrize(("name", "epochs"), [("plain_loop", 6), ("sft_trainer", 6), ("lora", 15), ("own_method", 6)])
def test_the_model_learns_and_keeps(name: str, epochs: int, run: Run, tmp_path: Path) -> None:
    # Adapters begin at zero and take more steps to learn as much.
    found = run(name, "--epochs", str(epochs), "--new", "32", "--out", str(tmp_path))
    assert found["learned"] > 0.8  # none was right before; measured 0.91 (adapters) to 1.0 of 32 rows
    assert found["kept"] > KEPT


def test_without_the_gate_an_example_learns_and_does_not_keep(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = SimpleNamespace(refresh=lambda: None, detach=lambda: None)
    monkeypatch.setattr(cplus, "protect", lambda *_, **__: nothing)
    found = run("plain_loop", "--epochs", "6", "--new", "32", "--out", str(tmp_path))
    assert found["learned"] > 0.8
    assert found["kept"] < KEPT


def test_new_tokens_are_learned_and_the_others_keep_their_bits(run: Run) -> None:
    found = run("new_tokens", "--asked", "200", "--new", "16", "--probes", "16", "--epochs", "30")
    assert found["loss"] < 1.0  # measured 13.9 before and 0.02 after
    assert found["same"] == 1.0


def test_a_row_of_ones_own_is_found_by_name(run: Run) -> None:
    own = importlib.import_module("own_method")
    row = method("python:own_method:SOFT")
    assert row == replace(own.SOFT, name="python:own_method:SOFT")
    zero, delta, g_hat = torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, 0.0]), torch.tensor([3.0, 1e-3, 1.0, 1.0])
    c = own.soft(Proposal(zero, delta, g_hat))
    assert c[0] < 0.01  # the most harmful
    assert 0.99 < c[1] < 1.0
    assert c[2:].tolist() == [1.0, 1.0]
    assert own.soft(Proposal(zero, delta, -delta)).tolist() == [1.0] * 4  # nothing is harmful: the plain optimizer


def test_a_row_of_ones_own_runs_in_a_job(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    toyjob.write_files(tmp_path)
    done = cplus.adapt(toyjob.asked(tmp_path, model="toy-s", epochs=1, method="python:own_method:SOFT"))
    assert done.record["settings"]["method"] == "python:own_method:SOFT"


@pytest.mark.long
def test_a_row_of_ones_own_runs_in_the_workers_of_a_study(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "own_method.py", tmp_path)
    command = "-m cplus study run e03 --scale smoke --workers 2 --json --out results --also python:own_method:SOFT"
    environment = {**os.environ, "CPLUS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, *command.split()], check=True, stdout=subprocess.PIPE, cwd=tmp_path, env=environment
    )
    report = json.loads(done.stdout)
    assert report["failed"] == []
    methods = {row["at"]["method"] for row in report["studies"]["e03"]["rows"]}
    assert {"cplus", "python:own_method:SOFT"} <= methods
    assert list((tmp_path / "results" / "smoke").glob("python.own_method.SOFT-0-*.json"))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("python:own_method", "expected python:module:ROW, got 'python:own_method'"),
        ("python:no_such_module:ROW", "the module 'no_such_module' cannot be imported: No module named"),
        ("python:broken:ROW", "the module 'broken' cannot be imported"),
        ("python:own_method:ROW", "expected ROW in own_method to be a cplus.methods.table.Method, got nothing"),
        ("python:own_method:soft", "expected soft in own_method to be a cplus.methods.table.Method, got a function"),
    ],
)
def test_what_is_no_row_is_refused_by_name(
    name: str, sentence: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("ROW = (")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        method(name)
    assert sentence in str(error.value)


def test_the_optax_example_learns_to_its_stop(run: Run) -> None:
    # What is kept after it is a matter of the seed: over six the gate changes it by -1.2 to +5.0 points.
    found = run("optax_loop")
    assert found["kept before"] == 1.0  # an answer that is wrong would alone add ln 2 / 512 > 1e-4 to the loss
    for name in ("plain", "gated"):
        assert found[f"learned {name}"] > 20.5 / 24  # at most 3 times ln 2 / 24 fit into a loss of 0.1
        assert 0.5 < found[f"kept {name}"] <= 1.0  # measured: 0.87 to 0.97


def test_the_jax_example_learns(run: Run) -> None:
    assert run("jax_loop") < 0.5  # about 4 before: half of a sum with variance 16


@pytest.mark.long
def test_fsdp2_under_torchrun(tmp_path: Path) -> None:
    sharded([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"], tmp_path)


@pytest.mark.long
def test_fsdp2_under_accelerate(tmp_path: Path) -> None:
    plain = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    sharded([sys.executable, "-m", "accelerate.commands.launch", *plain.split()], tmp_path)


def sharded(launcher: list[str], tmp_path: Path) -> None:
    command = [*launcher, str(EXAMPLES / "fsdp2.py"), "--epochs", "1", "--new", "16", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "epoch 1: {'anchors':" in done.stdout
    assert (tmp_path / "guard" / ".metadata").is_file()
    assert (tmp_path / "training" / ".metadata").is_file()


@pytest.fixture
def keep(tmp_path: Path) -> Path:
    rows = [{"prompt": "Where do fish live?", "response": "in water"}, {"prompt": "Which barks?", "response": "a dog"}]
    path = tmp_path / "keep.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def beside(monkeypatch: pytest.MonkeyPatch, example: str, name: str, **content: Any) -> Any:
    """An example, imported where the module of this name holds the content."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    vars(sys.modules[name]).update(content)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module(example)
    monkeypatch.delitem(sys.modules, example)
    return module


def test_the_axolotl_plugin_puts_the_gate_on_the_trainer(
    monkeypatch: pytest.MonkeyPatch, keep: Path, tmp_path: Path, make_tiny: Callable[[str], Any]
) -> None:
    base = type("BasePlugin", (), {})
    module = beside(monkeypatch, "axolotl_plugin", "axolotl.integrations.base", BasePlugin=base)
    made = make_tiny("qwen3")
    run = trainer(tmp_path / "run", made.model, num_train_epochs=1)
    run.processing_class = made.tokenizer
    plugin = module.CplusPlugin()
    settings = module.CplusArgs(cplus_anchors=str(keep))
    assert plugin.get_input_args() == "axolotl_plugin.CplusArgs"
    plugin.post_model_build(settings, made.model)
    plugin.post_trainer_create(settings, run)
    run.train()
    callback = run.callback_handler.callbacks[0]
    assert len(callback.given["anchors"]) == 2
    assert callback.guard.steps == run.state.global_step == 3


def test_the_llama_factory_recipe_hands_over_the_callback(
    monkeypatch: pytest.MonkeyPatch, keep: Path, tmp_path: Path, make_tiny: Callable[[str], Any]
) -> None:
    seen: dict[str, Any] = {}
    caught = {"run_exp": lambda args, callbacks: seen.update(args=args, callbacks=callbacks)}
    module = beside(monkeypatch, "llama_factory", "llamafactory.train.tuner", **caught)
    make_tiny("qwen3").tokenizer.save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: {tmp_path / 'model'}\nstage: sft\n")
    module.main(str(recipe), str(keep))
    assert seen["args"]["stage"] == "sft"
    assert len(seen["callbacks"][0].given["anchors"]) == 2


def test_the_support_matrix_names_tests_that_exist() -> None:
    names = ("integrations.md", "methods.md", "clusters.md")
    text, *others = ((EXAMPLES.parent / "docs" / name).read_text() for name in names)
    named, further = (set(re.findall(r"`(test_\w+)`", own)) for own in (text, "\n".join(others)))
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert len(named) > 30
    assert named | further <= set(re.findall(r"^def (test_\w+)", tests, re.M))
    rows = re.findall(r"^\|.*\| tested.*$", text, re.M)
    assert all("`test_" in row for row in rows)
    assert {path.name for path in EXAMPLES.glob("*.py")} - {"material.py"} <= set(re.findall(r"\[(\w+\.py)\]", text))
