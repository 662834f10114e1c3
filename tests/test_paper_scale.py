"""Scale paper is the paper's setting: one cell end to end on a stand-in, every run placed on a described machine."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import chatty
import pytest
import torch
from typer.testing import CliRunner

from cplus import models
from cplus.cli import app
from cplus.cli import study as study_command
from cplus.data.examples import Choice, lines
from cplus.jobs.memory import guard_bytes
from cplus.jobs.settings import AdaptConfig
from cplus.lab import SCALES, STUDIES, matching, runner, runs_of
from cplus.lab.estimate import PARAMETERS, RESERVE, described, need, width
from cplus.lab.runner import finished, in_this_process
from cplus.methods.table import METHODS
from cplus.probes.settings import TOPICS
from cplus.training.settings import RunSpec

PAPER = SCALES["paper"]
ALL = list(dict.fromkeys(spec for study in STUDIES.values() for spec in runs_of(study, PAPER)))


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app.app, ["study", "run", *arguments])


def test_the_papers_settings_are_on() -> None:
    runs = [spec for spec in ALL if isinstance(spec, RunSpec)]
    with_bank = [spec for spec in ALL if METHODS[spec.method].needs_bank]
    cue = [spec for spec in runs_of(STUDIES["e14"], PAPER) if not spec.topics]
    assert {spec for spec in with_bank if not spec.topics} == set(cue)  # without it only where the cue is the question
    curves = {spec for spec in runs_of(STUDIES["e06"], PAPER) if isinstance(spec, RunSpec) and spec.evaluate_every}
    assert {spec for spec in ALL if spec.compute_dtype == "float32"} == curves
    assert {spec.compute_dtype for spec in ALL} == {"float32", "bfloat16"}
    assert {(spec.batch_size, spec.order, spec.weight_decay) for spec in ALL} == {(1, "file", 0.1)}
    whole = [spec for spec in runs if spec.all_anchors]
    assert {(spec.method, spec.model, spec.task) for spec in whole} == {
        (method, "qwen3-0.6b", "csqa") for method in ("replay", "cpl", "cplus")
    }


def test_every_run_has_a_place_on_eight_devices_of_80_gb(tmp_path: Path) -> None:
    found = command("all", "--scale", "paper", "--dry-run", "--machine", "8x80", "--json")
    report = json.loads(found.stdout[found.stdout.index("{") :])
    assert (report["runs"], report["refused"]) == (len(ALL), 0)
    assert len(report["missing"]) == len(ALL)
    assert all(
        each["devices"] in (1, 2) and each["bytes"] < 0.94 * 80e9 and each["seconds"] > 0 for each in report["missing"]
    )
    assert "stated and not measured" in report["basis"]
    taken = {" ".join(each["run"].split()[:2]): each["devices"] for each in report["missing"]}
    assert [taken[run] for run in ("cplus qwen3-4b", "cplus gemma-2-2b-it", "ogd qwen3-4b")] == [2, 1, 1]
    # Here, without finished runs, times are by the speed measured.
    found = command("e08", "--scale", "smoke", "--out", str(tmp_path), "--dry-run", "--json")
    report = json.loads(found.stdout[found.stdout.index("{") :])
    assert re.fullmatch(r"[\d,]+ GFLOP per second, measured on .+", report["basis"])
    assert all(each["seconds"] > 0 for each in report["missing"])


def test_a_machine_that_is_too_small_and_bad_words_are_named() -> None:
    spec = PAPER.at(model="qwen3-4b", method="cplus")
    sentence = r"cplus qwen3-4b csqa .*: needs 99 GB on each of 1 devices, and the smallest has 23 GB"
    with pytest.raises(ValueError, match=sentence):
        width(spec, described("1x24"))
    for text in ("80", "0x80", "8x0", "eight"):
        with pytest.raises(ValueError, match="--machine must be DEVICESxGIGABYTES like 8x80"):
            described(text)
    assert "add --dry-run" in str(command("e08", "--scale", "smoke", "--machine", "8x80").exception)


def test_the_gates_bytes_are_those_of_the_engine() -> None:
    config = AdaptConfig(model="toy", new=["new.jsonl"], device="cpu")
    for name, row in METHODS.items():
        if row.projection is None and row.guarded:
            gate = (need(PAPER.at(method=name), 1) - RESERVE) / PARAMETERS[PAPER.base.model] - 16  # without it
            assert gate == pytest.approx(sum(guard_bytes(config, row, 8, 10**9, copies=True)), abs=0.01), name


def test_only_runs_with_the_named_settings() -> None:
    runs = runs_of(STUDIES["e01"], PAPER)
    cell = ("model=qwen3-0.6b", "task=csqa", "num_anchors=8", "method=cplus", "seed=0")
    [spec] = matching(runs, cell)
    assert spec == PAPER.at(method="cplus", num_anchors=8, seed=0)
    with pytest.raises(ValueError, match=r"got 'modle=x'; did you mean model"):
        matching(runs, ["modle=x"])
    with pytest.raises(ValueError, match=r"no run has method=lora; there are cpl, cplus, probe-replay, replay, sft"):
        matching(runs, ["method=lora"])


QUESTIONS = [
    Choice(id=f"q{n}", question=f"Number {n}?", choices=tuple(random.Random(n).sample("abcdefgh", 4)), answer=n % 4)
    for n in range(20)
]


EITHER = [Choice(id=f"e{n}", question="Which?", choices=("a", "b"), answer=n) for n in range(2)]
"""Whatever a model answers, it is right once."""


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[bool, int]]:
    """A tiny chat model in the place of Qwen3-0.6B, and small files of rows.

    Returns, as they happen, whether each pass of the model computes in bfloat16, and its rows.
    """
    chatty.write(tmp_path / "tiny")
    monkeypatch.setitem(models.PRESETS, "qwen3-0.6b", str(tmp_path / "tiny"))
    for name in ("csqa", "arc_c", "hellaswag", "piqa", "winogrande", "openbookqa"):
        rows = QUESTIONS if name == "csqa" else EITHER
        (tmp_path / f"{name}.jsonl").write_text(lines(rows))
    monkeypatch.setenv("CPLUS_DATA", str(tmp_path))
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runner, "CACHE", runner.ProcessCache())
    monkeypatch.setattr(study_command, "Processes", lambda **_: in_this_process)
    seen: list[tuple[bool, int]] = []
    load_model = models.load

    def watched(name: str, *arguments: Any, **more: Any) -> Any:
        found = load_model(name, *arguments, **more)
        found.model.get_input_embeddings().register_forward_hook(
            lambda module, given, out: seen.append((torch.is_autocast_enabled("cpu"), len(given[0])))
        )
        return found

    monkeypatch.setattr("cplus.models.loading.load", watched)
    return seen


def test_one_cell_of_the_paper_runs_end_to_end_on_a_stand_in(
    passes: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The paper's 512 probes and 25 epochs would take long here; everything else is the scale's own.
    base = replace(PAPER.base, num_probes=24, epochs=1)
    monkeypatch.setitem(SCALES, "paper", replace(PAPER, base=base))
    cell = ("model=qwen3-0.6b", "task=csqa", "num_anchors=4", "method=cplus", "seed=0")
    chosen = [part for setting in cell for part in ("--only", setting)]
    found = command("e01", "--scale", "paper", *chosen, "--out", str(tmp_path / "results"), "--json")
    assert found.exit_code == 0, found.exception
    report = json.loads(found.stdout[found.stdout.index("{") :])
    assert (report["runs"], report["done"], report["failed"]) == (1, 1, [])
    [result] = finished([SCALES["paper"].at(num_anchors=4)], tmp_path / "results" / "paper")
    # The cue: every area once in each round of 24 requests.
    [bank] = tmp_path.glob("cache/banks/*/probes.jsonl")
    probes = [json.loads(line) for line in bank.read_text().splitlines()]
    rounds = Counter((probe["request"] // len(TOPICS), probe["topic"]) for probe in probes)
    assert set(rounds.values()) == {1}
    assert {topic for _, topic in rounds} <= set(TOPICS)
    # Batch 1 in file order.
    counts = result.counts
    assert counts["updates"] == counts["new"]
    assert (counts["probes"], counts["anchors"], counts["past"] + counts["new"]) == (24, 4, 20)
    assert result.spec.order == "file"
    # The split, then the bank, then everything else: the bank alone is written and labelled in float32.
    assert [half for half, _ in groupby(passes, key=lambda one: one[0])] == [True, False, True]
    assert passes.count((True, 1)) >= counts["updates"]
    assert "not the paper's csqa" in result.environment["rows"]
    assert "csqa: 20 rows, not the paper's 1,096" in found.stderr
