"""The frontier: lines, distances, and the choice of a rate on seeds that report nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from cplus.lab import SCALES, STUDIES, frontier
from cplus.lab.frontier import Choice, chosen, distances, height, ladder, run_of, runs
from cplus.lab.records import RunResult
from cplus.lab.runner import finished
from cplus.methods.table import METHODS

DESK = SCALES["desk"]
[TUNING] = frontier.TUNING_SEEDS


def made(method: str, rung: Choice, seed: int, steps: int, kept: float, learned: float = 100.0) -> RunResult:
    """A run that took these updates and kept this much."""
    return RunResult(
        spec=run_of(DESK, method, rung, seed), retention=kept, retention_uncovered=kept, acquisition=learned,
        external={}, counts={"updates": steps}, cost={"training_flops": 10 * steps, "preservation_flops": 0},
        seconds=1.0, extra_bytes=0,
    )  # fmt: skip


FAST, SLOW = Choice(rate=1.6, warm=True), Choice(rate=0.2, warm=True)


def plain(seed: int) -> list[RunResult]:
    return [made("sft", FAST, seed, 10, 80.0), made("sft", SLOW, seed, 40, 90.0)]


def test_the_line_never_falls_and_ignores_runs_that_did_not_learn() -> None:
    found = [
        *plain(0),
        made("sft", Choice(rate=0.4, warm=True), 0, 20, 70.0),
        made("sft", Choice(rate=0.1, warm=True), 0, 5, 99.0, learned=50.0),
    ]
    assert frontier.frontier(found) == [(10.0, 80.0), (20.0, 80.0), (40.0, 90.0)]
    assert height([(10.0, 80.0), (40.0, 90.0)], 5.0) == 80.0
    assert height([(10.0, 80.0), (40.0, 90.0)], 80.0) == 90.0


def test_distances_are_paired_by_seed_and_need_full_learning() -> None:
    lines = [*plain(0), *plain(1)]
    own = [
        made("cplus", FAST, 0, 20, 95.0),
        made("cplus", FAST, 1, 20, 93.0),
        made("cplus", FAST, 2, 20, 99.0),
        made("cplus", SLOW, 1, 20, 99.0, learned=98.0),
    ]
    assert distances(own, lines) == pytest.approx({0: 10.0, 1: 8.0})
    assert distances(own[:1], lines, frontier.flops) == pytest.approx({0: 10.0})


def test_the_tuning_seed_chooses_within_the_budget_and_other_seeds_do_not() -> None:
    found = [
        *plain(TUNING),
        made("cplus", FAST, TUNING, 10, 85.0),
        made("cplus", SLOW, TUNING, 40, 97.0),
        made("cplus", Choice(rate=0.1, warm=True), TUNING, 41, 99.0),
        made("osf", FAST, TUNING, 80, 99.0),
        made("osf", SLOW, TUNING, 70, 98.0),
        made("lora", FAST, TUNING, 10, 99.0, learned=10.0),
        made("cplus", FAST, 0, 10, 99.0),
    ]
    best = chosen(found, DESK.base.lr)
    assert best["cplus"] == SLOW  # SFT needs 40 updates at this rung
    assert best["osf"] == SLOW  # nothing lies within the budget: the fewest updates
    assert "lora" not in best  # it did not learn


def test_every_rung_is_half_of_the_one_before_and_reported_seeds_choose_nothing() -> None:
    for method in (*frontier.NEIGHBOURS, *frontier.OURS):
        warm = [rung.rate for rung in ladder(method)[: frontier.LADDER] if rung.warm]
        assert len(warm) == 5
        assert len(ladder(method)) == frontier.LADDER * (2 if method in frontier.ABLE else 1)
        assert all(a == pytest.approx(2 * b) for a, b in itertools.pairwise(warm))
        assert method in METHODS
    specs = runs(DESK)
    assert {spec.seed for spec in specs if spec.method == "sft"} == {TUNING, *range(5, 15)}
    assert {spec.seed for spec in specs if spec.method == "lora"} == {TUNING, *range(5, 10)}
    demos = {frontier.demo_run(DESK, spec.method, spec.seed) for spec in specs}
    assert {spec.stop_at for spec in specs if spec not in demos} == {frontier.LEARNED}
    assert len(demos & set(specs)) == 20


def test_what_was_chosen_is_what_the_committed_results_choose() -> None:
    folder = Path(__file__).parent.parent / "results" / "desk"
    found = [result for result in finished(runs(DESK), folder) if isinstance(result, RunResult)]
    tuned = [result for result in found if result.spec.seed == TUNING]
    assert chosen(tuned, DESK.base.lr) == dict(frontier.CHOSEN)


def test_the_summary_compares_the_recipe_with_every_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "CHOSEN", {"sft": SLOW, frontier.RECIPE: FAST, "replay": FAST})
    found = [
        each
        for seed in range(3)
        for each in (
            *plain(seed),
            made(frontier.RECIPE, FAST, seed, 20, 98.0 + 0.1 * seed),
            made("replay", FAST, seed, 20, 86.0),
        )
    ]
    for seed, (method, kept) in itertools.product(range(3), (("sft", 100.0), ("sft-repair", 92.0))):
        demo = frontier.demo_run(DESK, method, seed)  # its training is not on the line
        found.append(replace(made(method, FAST, seed, 11, kept + (0.1 * seed if kept < 100 else 0)), spec=demo))
    summary = STUDIES["frontier"].summary(found)
    assert [claim.verdict for claim in summary.claims] == ["holds"] * 4 + ["not run"]  # the line, SFT, Replay, repairs
    assert "keeps 98.1 ± 0.1 % with 20.0 ± 0.0 updates: +13.1 ± 0.1 points" in summary.answer
    assert "a repair of SFT keeps 92.1 ± 0.1 %, one of CPLUS not run %" in summary.answer
    rows = {row.at["method"]: row.figures for row in summary.rows}
    assert rows["sft"]["updates"].mean == 40.0  # the chosen rung alone
    assert rows["replay"]["above SFT at equal updates"].mean == pytest.approx(1.0)
