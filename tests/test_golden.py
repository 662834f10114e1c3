"""Behaviour from outside, by the command line and the documented Python alone: weights, banks, scores and figures.

python tests/test_golden.py                 rewrites tests/data/golden.json
python tests/test_golden.py --exact FILE    writes all of it bit for bit, or compares; exit code 1 if FILE differs
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chatty
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import cplus
from cplus.__main__ import main
from cplus.models import load

TESTS = Path(__file__).parent
GOLDEN = TESTS / "data" / "golden.json"
ROWS = TESTS.parent / "examples" / "rows"
# Five or more times the largest difference between AVX-512, AVX2 and SSE.
TOLERANCES = {"weights": 2e-3, "banks": 1e-3, "scores": 1e-3, "figures": 1e-2}
FIGURES = ("bank", "cost", "counts", "curve", "epochs", "figures", "repair", "rows", "steps", "tokens_by_role")
LEFT_OUT = {"answer", "changed", "created", "engine", "head", "seconds", "verdict"}
"""Times, versions, sentences, and how answers that are not the same differ."""
NOT_PORTABLE = {"drawn_from", "exact", "lines", "model", "moved", "probes_sha256", "undone", "weights"}
"""What another processor may round otherwise; compared with --exact alone."""


def command(*words: object) -> Any:
    """What a command prints with --json, without what differs between two runs; run in this process."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = ["cplus", *map(str, words), "--json"]
    try:
        with contextlib.redirect_stdout(printed):
            main()
    except SystemExit as ended:
        if ended.code:
            raise ValueError(f"exit code {ended.code}: {' '.join(sys.argv)}") from ended
    finally:
        sys.argv = before
    return without(json.loads(printed.getvalue()), LEFT_OUT)


def without(value: Any, names: set[str]) -> Any:
    """The value without what has one of these names, at any depth."""
    if isinstance(value, dict):
        return {name: without(own, names) for name, own in value.items() if name not in names}
    return [without(own, names) for own in value] if isinstance(value, list) else value


def change(model: Path, base: Path) -> dict[str, Any]:
    """For each tensor the norm of its change, and of the part of it that has random signs; `exact` is all the bits."""
    weights, known = load_file(model / "model.safetensors"), load_file(base / "model.safetensors")
    assert weights.keys() == known.keys()
    norms, parts = [], []
    for name in sorted(weights):
        delta = weights[name].astype(np.float64).ravel() - known[name].astype(np.float64).ravel()
        signs = np.random.RandomState(0).choice([-1.0, 1.0], delta.size)
        norms.append(float(np.linalg.norm(delta)))
        parts.append(float(np.linalg.norm(np.maximum(delta * signs, 0.0))))
    bits = b"".join(weights[name].tobytes() for name in sorted(weights))
    return {"norms": norms, "parts": parts, "exact": hashlib.sha256(bits).hexdigest()}


def prepare() -> None:
    """Models and rows in the working folder: the toy's weights, the chat model, fewer and free-form rows."""
    chatty.write(Path("chatty"))
    for name in ("toy", "toy-s"):
        loaded = load(name, device="cpu")
        loaded.model.save_pretrained(name + "-base")
        loaded.tokenizer.save_pretrained(name + "-base")
    for name in ("new", "keep", "past"):
        rows = [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text().splitlines()]
        free = [{"prompt": row["question"], "response": row["choices"][row["answer"]]} for row in rows]
        for path, few in ((f"{name}.jsonl", rows), (f"few-{name}.jsonl", rows[:8]), (f"free-{name}.jsonl", free[:8])):
            Path(path).write_text("".join(json.dumps(row) + "\n" for row in few))


def weights() -> dict[str, Any]:
    """Every row of the table after four updates of the toy."""
    same: dict[str, Any] = {
        "model": "toy-s", "new": "few-new.jsonl", "anchors": "few-keep.jsonl", "interface": "cloze",
        "lr": 1e-3, "epochs": 2, "batch_size": 4, "stop": "never", "device": "cpu",
        "evaluate_every": 0,
    }  # fmt: skip
    # Here some gradients are rounding alone, of which AdamW makes whole steps.
    own: dict[str, Any] = {key: {"optimizer": "sgd", "lr": 0.1} for key in ("asft", "mofo", "probe-distillation")}
    found = {}
    for name, row in cplus.METHODS.items():
        values = {**same, **own.get(name, {}), **({"num_probes": 8} if row.needs_bank else {})}
        values |= {"ema": "float32"} if row.beta else {}
        cplus.adapt(cplus.AdaptConfig(**values, method=name, out=Path("weights", name)))
        found[name] = change(Path("weights", name, "model"), Path("toy-s-base"))
    return found


def banks() -> dict[str, Any]:
    """Banks by each interface, from anchors and from nothing: what is written, its labels, and what is rejected."""
    asked: dict[str, tuple[object, ...]] = {
        "cloze": ("toy-s", "--anchors", "few-keep.jsonl", "--interface", "cloze"),
        "letter": ("chatty", "--anchors", "few-keep.jsonl", "--interface", "letter"),
        "freeform": ("chatty", "--anchors", "free-keep.jsonl"),
        "general": ("chatty", "--keep", "general"),
        "texts": ("toy-s", "--keep", "general"),
    }
    found = {}
    for name, words in asked.items():
        printed = command("probe", *words, "--num-probes", 8, "--out", f"banks/{name}")
        rows = [json.loads(line) for line in Path("banks", name, "probes.jsonl").read_text().splitlines()]
        confidence = [row.pop("confidence") for row in rows]
        found[name] = {**printed, "rows": rows, "confidence": confidence}
    return found


def scores() -> dict[str, Any]:
    """Answers and scores of single rows by each interface."""
    found = {}
    for name, folder, rows, kind in (
        ("cloze", "toy-base", "few-past.jsonl", {"interface": "cloze", "chat": False}),
        ("letter", "chatty", "few-past.jsonl", {"interface": "letter"}),
        ("freeform", "chatty", "free-past.jsonl", {"max_new_tokens": 12}),
        ("plain", "toy-base", "free-past.jsonl", {"chat": False, "max_new_tokens": 4}),
    ):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        said = cplus.evaluate(model, tokenizer, rows, **kind)
        answers = [[row.answer, row.correct, list(row.num_tokens)] for row in said.predictions]
        values = [[float(score) for score in row.scores] for row in said.predictions]
        found[name] = {"summary": said.summary, "answers": answers, "scores": values}
    return found


def figures() -> dict[str, Any]:
    """The README's job, a chat model's, a repair, two checks, two updates and two small studies."""
    files = ("--new", "new.jsonl", "--anchors", "keep.jsonl", "--past", "past.jsonl")
    exact = ("--set", "ema=float32")
    toy, study = (*files, "--interface", "cloze"), ("--scale", "smoke", "--workers", 1, "--out", "results", "--only")
    command("adapt", "toy", *toy, *exact, "--lr", 1e-3, "--out", "adapt")
    command("adapt", "chatty", "--new", "free-new.jsonl", "--lr", 1e-3, "--epochs", 2, *exact, "--out", "chat")
    command("repair", "toy", "adapt/model", *toy, "--out", "repair")
    own = ("--set", "past=past.jsonl", "--set", "interface=cloze", "--set", "lr=1e-3", "--set", "epochs=2", *exact)
    command("update", "ledger", "--model", "toy", *files[:4], *own)
    found = {
        "update": command("update", "ledger", "--new", "few-past.jsonl", "--set", "epochs=1"),
        "check": command("check", "toy", "adapt/model", "--num-probes", 8),
        "check of chat": command(
            "check", "chatty", "chat/model", "--num-probes", 8, "--abilities", "everyday,instructions"
        ),
        "study": command("study", "run", "e03", *study, "num_anchors=4"),
        "sequence": command("study", "run", "e05", *study, "method=cplus"),
    }
    for folder in ("adapt", "chat", "repair", "ledger/stages/002/job"):
        record = json.loads(Path(folder, "record.json").read_text())
        own = without({key: record[key] for key in FIGURES if key in record}, LEFT_OUT)
        base = "chatty" if folder == "chat" else "toy-base"
        found[folder] = {**own, "weights": change(Path(folder, "model"), Path(base))}
    return found


PARTS = {"weights": weights, "banks": banks, "scores": scores, "figures": figures}


@contextlib.contextmanager
def working_folder() -> Iterator[None]:
    """A new folder with the material and an empty cache, and one thread."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPLUS_CACHE", str(Path(folder, "cache")))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        prepare()
        yield
        torch.set_num_threads(threads)


def differences(found: Any, stored: Any, tolerance: float, where: str = "", scale: float = 0.5) -> list[str]:
    """What differs by more than the tolerance, relative to the largest number of a list; below 0.5 it is absolute."""
    if isinstance(found, list) and isinstance(stored, list):
        scale = max((abs(value) for value in stored if isinstance(value, float)), default=scale)
        found, stored = dict(enumerate(found)), dict(enumerate(stored))
    if isinstance(found, dict) and isinstance(stored, dict):
        pairs = [(f"{where}/{key}", found.get(key), stored.get(key)) for key in {**stored, **found}]
        return [line for at, one, other in pairs for line in differences(one, other, tolerance, at, scale)]
    if isinstance(found, float) and isinstance(stored, float):
        same = abs(found - stored) <= tolerance * max(scale, abs(stored))
    else:
        same = found == stored
    return [] if same else [f"{where}: {found!r:.200}, stored {stored!r:.200}"]


@pytest.fixture(scope="module")
def material() -> Iterator[None]:
    with working_folder():
        yield


def entries(part: str) -> dict[str, Any]:
    """The part's entries as JSON holds them."""
    return {f"{part}/{name}": json.loads(json.dumps(value)) for name, value in PARTS[part]().items()}


@pytest.mark.parametrize("part", PARTS)
def test_behaviour_is_as_stored(part: str, material: None) -> None:
    stored = {name: value for name, value in json.loads(GOLDEN.read_text()).items() if name.startswith(part)}
    assert differences(without(entries(part), NOT_PORTABLE), stored, TOLERANCES[part]) == []


def write(arguments: list[str]) -> int:
    """Write the golden file, or write or compare an exact one."""
    with working_folder():
        found = {name: value for part in PARTS for name, value in entries(part).items()}
        found["caches"] = sorted(path.name for path in Path("cache", "banks").iterdir() if path.is_dir())
    if not arguments:
        portable = json.dumps(without(found, {*NOT_PORTABLE, "caches"}))  # caches are named after versions too
        rounded = json.loads(portable, parse_float=lambda text: float(f"{float(text):.5g}"))
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in rounded.items()]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    elif not (exact := Path(arguments[1])).exists():
        exact.write_text(json.dumps(found, indent=1))
    elif unequal := differences(found, json.loads(exact.read_text()), 0.0):
        print(*unequal, sep="\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(write(sys.argv[1:]))
