"""The study of real models' facts: its runs, the best rate of each neighbour, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from cplus.lab import SCALES, STUDIES, facts, runs_of
from cplus.lab.facts import comparison, tab_facts
from cplus.lab.records import RunResult
from cplus.lab.report import collect
from cplus.lab.runner import save


def done(method: str, seed: int, kept: float, rate: float = 1.0, learned: float = 100.0) -> RunResult:
    return RunResult(
        spec=facts.run_at(facts.GEMMA, method, rate, seed), retention=kept, retention_uncovered=kept,
        acquisition=learned, external={}, counts={"updates": 30}, cost={}, seconds=1.0, extra_bytes=0,
    )  # fmt: skip


def test_every_method_comes_at_the_first_rate_before_any_comes_at_another() -> None:
    specs = runs_of(STUDIES["facts"], SCALES["desk-real"])
    gemma = [spec for spec in specs if spec.model == "gemma-3-270m"]
    first = [spec for spec in gemma if spec.lr == facts.GEMMA.base.lr]
    assert gemma[: len(first)] == first
    assert ({spec.method for spec in first}, len(first), len(gemma)) == (set(facts.METHODS), 12, 21)
    assert {spec.num_probes for spec in gemma if spec.method == "cplus"} == {48}
    qwen = [spec for spec in specs if spec.model != "gemma-3-270m"]
    assert [spec.method for spec in qwen] == list(facts.METHODS)
    assert all(spec.settings.lora is not None and spec.interface == "letter" for spec in qwen)
    assert not runs_of(STUDIES["facts"], SCALES["desk"])


def test_cplus_is_held_against_each_neighbours_best_rate(tmp_path: Path) -> None:
    found = []
    for seed in range(3):
        found += [done("cplus", seed, 90.0 + seed), done("sft", seed, 80.0 + seed)]
        found += [done("sft", seed, 92.0 + seed, rate=0.5)]
        # A rate that did not learn keeps everything and does not count.
        found += [done("replay", seed, 85.0 + 2 * seed), done("replay", seed, 100.0, rate=0.5, learned=60.0)]
    summary = STUDIES["facts"].summary(found)
    margins = {claim.says: (claim.verdict, claim.margin) for claim in summary.claims}
    assert margins["gemma-3-270m: CPLUS keeps more than cpl at its best rate"] == ("not run", None)
    verdict, margin = margins["gemma-3-270m: CPLUS keeps more than sft at its best rate"]
    assert margin is not None
    assert (verdict, margin.mean) == ("fails", pytest.approx(-2.0))
    verdict, margin = margins["gemma-3-270m: CPLUS keeps more than replay at its best rate"]
    assert margin is not None
    assert (verdict, margin.mean) == ("holds", pytest.approx(4.0))
    assert "sft 93.0 ± 0.6, replay 87.0 ± 1.2, cpl not run, cplus 91.0 ± 0.6; qwen" in summary.answer
    folder = tmp_path / "desk-real"
    for result in found:
        save(result, folder)
    collected = collect(folder)
    table = tab_facts(collected)
    assert (table.rows[0][1], len(table.rows)) == ("Replay", 5)
    line, _ = comparison(collected)
    assert line.measured == "81.0 ± 0.6 / 87.0 ± 1.2 / not run / 91.0 ± 0.6"
