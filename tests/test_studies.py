"""Every study at smoke scale, and the runner: what it repeats, what stops it and what it leaves alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from toyjob import write_rows
from typer.testing import CliRunner

from cplus import models
from cplus.cli import app
from cplus.core import algorithm, evidence
from cplus.core import guard as attach
from cplus.data.examples import Choice, Prediction
from cplus.evaluation.changes import answer_prior
from cplus.lab import SCALES, STUDIES, Spec, e01, e06, e09, e13, runs_of, scale_named, studies_named
from cplus.lab.records import RunResult, record_name
from cplus.lab.runner import Cluster, EndedRun, RunGroup, finished, in_this_process, perform, save
from cplus.lab.runs import split_task
from cplus.lab.scales import family, seedless
from cplus.lab.study import Claim, Estimate, judged, tally
from cplus.lab.summaries import difference, margin, over_seeds, pick, retained
from cplus.methods.table import METHODS
from cplus.methods.variants import Remembered
from cplus.toy import world
from cplus.training.settings import RunSpec

SMOKE = SCALES["smoke"]
ALL = list(dict.fromkeys(spec for study in STUDIES.values() for spec in runs_of(study, SMOKE)))
CLI = [sys.executable, "-c", "from cplus.cli.app import main; main()"]
STRESS = runs_of(STUDIES["e08"], SMOKE)


@pytest.fixture(scope="session")
def cache(smoke_results: tuple[Path, Path]) -> Iterator[Path]:
    """The cache of banks and splits of these tests, separate from the user's."""
    folder = smoke_results[1]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with mock.patch.dict(os.environ, {"CPLUS_CACHE": str(folder)}):
        yield folder
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def results(smoke_results: tuple[Path, Path], cache: Path) -> Path:
    """All studies' results at smoke scale."""
    return smoke_results[0]


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app.app, ["study", *(() if arguments[0] == "list" else ("run",)), *arguments])


@pytest.mark.parametrize("name", list(STUDIES))
def test_a_study_answers_from_its_own_results_and_says_so_without_any(results: Path, name: str) -> None:
    study = STUDIES[name]
    empty = study.summary([])
    assert "not run" in empty.answer
    assert all(claim.verdict == "not run" for claim in empty.claims)
    if not (own := runs_of(study, SMOKE)):
        return
    summary = study.summary(finished(own, results / "smoke"))
    assert "not run" not in summary.answer
    assert summary.rows
    assert summary.claims
    assert all(claim.margin is not None and claim.verdict == "unclear" for claim in summary.claims)  # one seed
    seeds = 2 if name == "e12" else 1  # one more to confirm by
    assert all(estimate.count <= seeds for row in summary.rows for estimate in row.figures.values())
    json.dumps(summary.row(), allow_nan=False)
    papers, ours = any(claim.paper for claim in summary.claims), {c.says for c in summary.claims if c.paper is None}
    assert papers or name not in {f"e{n:02d}" for n in range(1, 11)}
    assert not papers or name not in ("e11", "e12", "e13")
    if name == "e05":
        assert len(ours) == 3
        assert all("mean over stages" in words for words in ours)
    if name == "e04":
        assert any(words.startswith("masking the update") for words in ours)


def test_the_command_repeats_nothing_and_prints_one_object(results: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*.json*")}
    found = command("all", "--scale", "smoke", "--out", str(results), "--json")
    report = json.loads(found.stdout)
    assert (found.exit_code, report["done"], report["runs"], report["failed"]) == (0, 0, len(ALL), [])
    assert set(report["studies"]) == set(STUDIES) - {"chat", "facts"}  # which need real models
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*.json*")} == before
    assert STUDIES["e09"].question in command("e09", "--scale", "smoke", "--out", str(results)).stdout


def test_removing_one_result_repeats_exactly_one_run(results: Path, tmp_path: Path) -> None:
    folder, gone = tmp_path / "smoke", STRESS[2]
    for result in finished([*STRESS[:2], *STRESS[3:]], results / "smoke"):
        save(result, folder)
    report = json.loads(command("e08", "--scale", "smoke", "--out", str(tmp_path), "--dry-run", "--json").stdout)
    assert (report["runs"], report["there"]) == (4, 3)
    [missing] = report["missing"]
    assert missing["file"] == record_name(gone)
    assert missing["seconds"] > 0
    assert list(perform(STRESS, folder, in_this_process)) == [EndedRun(spec=gone, outcome="done")]
    [kept], [again] = (finished([gone], place) for place in (results / "smoke", folder))
    assert replace(again, seconds=kept.seconds, environment=kept.environment) == kept  # and it is the same run


@pytest.mark.long
def test_two_runners_share_the_work_and_each_has_every_result(cache: Path, tmp_path: Path) -> None:
    line = [*CLI, "study", "run", "e08", "--scale", "smoke", "--out", str(tmp_path)]
    both = [subprocess.Popen([*line, "--workers", "1", "--json"], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    reports = [json.loads(each.communicate(timeout=240)[0]) for each in both]
    assert [each.returncode for each in both] == [0, 0]
    assert sum(report["done"] for report in reports) == len(STRESS)
    assert reports[0]["studies"] == reports[1]["studies"]
    left = [path.name for path in (tmp_path / "smoke").rglob("*") if path.is_file()]
    assert left == ["e08.jsonl"]  # no lock and no part of a file
    assert len((tmp_path / "smoke" / left[0]).read_text().splitlines()) == len(STRESS)


def test_an_interrupted_runner_leaves_whole_results_only(cache: Path, tmp_path: Path) -> None:
    line = [*CLI, "study", "run", "all", "--scale", "smoke", "--out", str(tmp_path), "--workers", "1"]
    # A background process of a shell ignores SIGINT, and so would its children.
    heard, silent = (lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)), subprocess.DEVNULL
    runner = subprocess.Popen(line, stdout=silent, stderr=silent, start_new_session=True, preexec_fn=heard)
    ends = time.monotonic() + 120
    while not list(tmp_path.rglob("*.jsonl")) and time.monotonic() < ends:
        time.sleep(0.02)
    os.killpg(runner.pid, signal.SIGINT)
    assert runner.wait(timeout=60) == 130
    assert 0 < len(finished(ALL, tmp_path / "smoke")) < len(ALL)


def test_a_failed_run_is_reported_stops_no_other_and_wrong_names_get_the_nearest(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean e"):
        studies_named("e00")
    with pytest.raises(ValueError, match="did you mean desk"):
        scale_named("dsek")
    broken = replace(STRESS[0], method="no-such-method")
    ended = list(perform([broken, STRESS[0]], tmp_path, in_this_process))
    assert [(e.outcome, e.failed is not None) for e in ended] == [(None, True), ("done", False)]
    assert "unknown method 'no-such-method'" in str(ended[0].failed)


def test_submitit_runs_a_study_in_its_local_mode(cache: Path, tmp_path: Path) -> None:
    import submitit

    assert isinstance(
        RunGroup(STRESS, tmp_path).__submitit_checkpoint__(), submitit.helpers.DelayedSubmission
    )  # back into the queue
    cluster = Cluster(logs=tmp_path / "logs", cluster="local", parameters={"timeout_min": 5})
    ended = list(perform(STRESS[:1], tmp_path / "smoke", cluster))
    assert [e.outcome for e in ended] == ["done"]
    assert len(finished(STRESS[:1], tmp_path / "smoke")) == 1


def test_a_slurm_profile_becomes_submitits_parameters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class AutoExecutor:
        def __init__(self, folder: str, cluster: str, **limits: Any) -> None:
            seen.update(cluster=cluster, limits=limits)

        def update_parameters(self, **parameters: Any) -> None:
            seen["parameters"] = parameters
            raise NameError("Unknown argument")  # as submitit does for a name it does not know

    monkeypatch.setitem(sys.modules, "submitit", types.SimpleNamespace(AutoExecutor=AutoExecutor))
    profile = Path(__file__).parent.parent / "examples" / "slurm.yaml"
    asked = ["e08", "--scale", "smoke", "--out", str(tmp_path), "--slurm"]
    run = command(*asked, str(profile), "--slurm", "slurm_partition=big")
    assert "submitit does not accept these parameters: Unknown argument" in str(run.exception)
    parameters = seen.pop("parameters")
    assert seen == {"cluster": "slurm", "limits": {"slurm_max_num_timeout": 10}}
    assert parameters["slurm_partition"] == "big"  # later values override earlier ones
    assert parameters["slurm_array_parallelism"] == 64
    assert "slurm_max_num_timeout" not in parameters
    wrong = command(*asked, "gpu")
    assert "--slurm must be NAME=VALUE or a YAML file, got gpu" in str(wrong.exception)


def test_runs_that_look_at_no_bank_or_anchor_are_named_once() -> None:
    drawless = {"sft", "cautious", "mofo", "wise-ft", "kl-base", "asft", "eaft", "talr", "stm", "flow"}
    alone = drawless | {"lora", "osf", "freeze-layers"}
    assert {name for name, row in METHODS.items() if not row.needs_anchors} == alone
    anchors = {"replay", "agem", "ogd", "distillation", "ewc", "cpl", "cplus-anchors"}
    assert {name for name, row in METHODS.items() if not row.needs_bank} == alone | anchors
    assert {name for name, row in METHODS.items() if not row.draws} == drawless
    for name in METHODS:
        few, many = (SMOKE.at(method=name, num_anchors=a, num_probes=n) for a, n in ((4, 8), (16, 32)))
        assert (few == many) == (name in alone)
    for scale in SCALES.values():
        specs: list[Spec] = [spec for study in STUDIES.values() for spec in runs_of(study, scale)]
        assert len({spec.key() for spec in specs}) == len(set(specs))


def test_the_page_says_what_there_is_and_the_desk_takes_hours_not_days(tmp_path: Path) -> None:
    docs = Path(__file__).parent.parent / "docs"
    text = (docs / "studies.md").read_text()
    assert all(f"`{name}`" in text for name in SCALES)
    questions = text + (docs / "results.md").read_text()
    assert all(f"`{name}`" in questions or f"\n| {name} |" in questions for name in STUDIES)
    for scale in ("desk", "desk-real", "paper"):
        runs = {spec for study in STUDIES.values() for spec in runs_of(study, SCALES[scale])}
        assert f"{len(runs):,} runs" in text
    assert {name for name, study in STUDIES.items() if not runs_of(study, SCALES["desk"])} == {"chat", "facts"}
    report = json.loads(command("all", "--scale", "desk", "--out", str(tmp_path), "--dry-run", "--json").stdout)
    assert report["hours"] < 10


def record(spec: RunSpec, retention: float, **more: Any) -> RunResult:
    """An artificial result."""
    figures: dict[str, Any] = {"retention": retention, "retention_uncovered": 0.0, "acquisition": 100.0, **more}
    return RunResult(spec=spec, external={}, counts={}, cost={}, seconds=1.0, extra_bytes=0, **figures)


def looks(curve: Sequence[tuple[float, float]]) -> list[dict[str, float]]:
    """A curve of Acquisition and Retention."""
    return [{"epoch": float(n), "acquisition": a, "retention": r} for n, (a, r) in enumerate(curve, start=1)]


def test_runs_that_no_seed_changes_are_run_once_and_paired_with_every_seed() -> None:
    paper = [spec for study in STUDIES.values() for spec in dict.fromkeys(study.runs(SCALES["paper"]))]
    plain = [spec for spec in paper if spec.method == "sft"]
    assert plain
    assert all(spec.seed == 0 and seedless(spec) for spec in plain)
    assert {spec.seed for spec in paper if spec.method == "cplus"} >= {0, 1, 2, 3, 4}
    desk = [spec for study in STUDIES.values() for spec in study.runs(SCALES["desk"])]
    assert {spec.seed for spec in desk if spec.method == "sft"} >= {0, 1, 2, 3, 4}  # new rows are drawn and shuffled
    drawn = replace(SCALES["paper"].at(method="sft"), external_limit=10)
    assert not seedless(drawn)  # other outside rows are evaluated for every seed
    once = record(SCALES["paper"].at(method="sft", seed=3), 40.0)
    ours = [record(SCALES["paper"].at(seed=seed), 70.0 + seed) for seed in range(3)]
    found = margin(ours, [once])
    assert found is not None
    assert (found.mean, found.count) == (31.0, 3)
    assert over_seeds([once], retained) == Estimate(40.0, None, 1)  # one run has no standard error
    assert margin([once], [once]) == Estimate(0.0, None, 1)
    assert difference({0: 5.0, 1: 7.0}, {None: 1.0}) == Estimate(5.0, 1.0, 2)


def test_the_headline_compares_with_each_settings_own_strongest_baseline() -> None:
    def at(task: str, method: str, retention: float, seed: int = 0, model: str = "toy") -> RunResult:
        return record(SMOKE.at(model=model, task=task, method=method, num_anchors=4, seed=seed), retention)

    kept = {
        ("harbours", "cplus"): (80.0, 80.0), ("harbours", "cpl"): (78.0, 78.0), ("harbours", "replay"): (40.0, 40.0),
        ("plants", "cplus"): (70.0, 74.0), ("plants", "cpl"): (50.0, 50.0), ("plants", "replay"): (60.0, 60.0),
    }  # fmt: skip
    rows = [at(task, method, own[seed], seed) for (task, method), own in kept.items() for seed in (0, 1)]
    rows += [at("harbours", method, value, model="gemma-2-2b-it") for method, value in (("cplus", 99.0), ("cpl", 9.0))]
    found = e01.gain(family(rows))  # cpl at harbours, replay at plants; another family is not counted
    assert found == Estimate(7.0, 1.0, 2)
    assert e01.summary(rows).claims[0].margin == found


def test_the_share_recovered_is_the_macro_average_of_the_tasks_shares() -> None:
    rows = [
        record(SMOKE.at(model="toy", task=task, method=method, num_anchors=budget), kept)
        for task, plain, ours in (("harbours", 90.0, 95.0), ("plants", 50.0, 60.0))
        for method, budget, kept in (("sft", 0, plain), ("cplus", 4, ours - 1.0), ("cplus", 8, ours + 1.0))
    ]
    [row] = e01.recovered(rows)
    assert row.figures["recovery"].mean == pytest.approx((50.0 + 20.0) / 2)  # of the means it would be 25


def test_claims_of_the_paper_and_our_own_are_counted_apart(results: Path) -> None:
    held, open_ = Estimate(3.0, 0.5, 5), Estimate(3.0, 9.0, 5)
    claims = [*(Claim(says="", margin=own, paper="Fig. 5") for own in (held, open_)), Claim("", held), Claim("", None)]
    assert judged(claims) == "1 of 2 of the paper's comparisons hold, 1 unclear; 1 of 2 of our own, 1 not run"
    assert tally(claims)["ours"] == {"holds": 1, "fails": 0, "unclear": 0, "not run": 1}
    report = json.loads(command("e05", "--scale", "smoke", "--out", str(results), "--json").stdout)["studies"]["e05"]
    assert sum(report["verdicts"]["ours"].values()) == 3
    assert {claim["paper"] for claim in report["claims"]} == {"Sec. 4.5; Table 7", "Sec. 4.5; Table 8", None}


def test_curves_are_judged_by_speed_by_the_least_lead_and_by_late_recovery() -> None:
    def made(method: str, *curve: tuple[float, float]) -> RunResult:
        return record(SMOKE.at(method=method, evaluate_every=1, external=()), curve[-1][1], curve=looks(curve))

    ours = made("cplus", (60.0, 70.0), (100.0, 75.0), (100.0, 82.0))
    theirs = made("cpl", (50.0, 90.0), (90.0, 71.0), (100.0, 70.0))
    margins = {claim.says: claim.margin for claim in e06.summary([ours, theirs]).claims}
    assert margins["CPLUS reaches full Acquisition in fewer epochs than cpl"] == Estimate(1.0, None, 1)
    assert margins["from its full Acquisition on CPLUS is above cpl at every epoch"] == Estimate(4.0, None, 1)
    assert margins["cplus: Retention rises again after full Acquisition"] == Estimate(7.0, None, 1)
    assert e06.recovered(theirs) == 0.0
    assert e06.recovered(made("sft", (90.0, 50.0))) is None


def test_differences_are_paired_by_place_and_seed() -> None:
    def made(method: str, task: str, seed: int, retention: float) -> RunResult:
        return record(SMOKE.at(method=method, task=task, seed=seed, num_anchors=4), retention)

    ours = [made("cplus", *cell) for cell in (("easy", 0, 90.0), ("hard", 0, 50.0), ("easy", 1, 91.0))]
    cells = (("easy", 0, 88.0), ("hard", 0, 46.0), ("easy", 1, 90.0), ("hard", 1, 40.0), ("easy", 2, 9.0))
    rows = [*ours, *(made("cpl", *cell) for cell in cells)]
    assert margin(pick(rows, method="cplus"), pick(rows, method="cpl")) == Estimate(2.0, 1.0, 2)


def test_a_gentle_start_is_measured_where_the_rows_are_first_known() -> None:
    def made(warmup: float, *curve: tuple[float, float]) -> RunResult:
        return record(SMOKE.at(method="sft", warmup=warmup), 1.0, curve=looks(curve))

    late = made(0.5, (50.0, 98.0), (100.0, 88.0))
    early = made(0.0, (99.5, 60.2), (100.0, 50.0))
    assert e13.kept_at(75.0)(late) == pytest.approx(93.0)  # halfway between two looks
    assert (e13.epochs_to_learn(late), e13.level([late, early])) == (2, 99.0)
    assert e13.level([late, made(0.0, (80.0, 70.0))]) == 80.0  # all can be compared there
    [claim, *_] = e13.summary([late, early]).claims
    assert claim.margin is not None
    assert claim.margin.mean == pytest.approx((98.0 - 10.0 * 49 / 50) - (100.0 - 39.8 * 99.0 / 99.5))


def test_the_prior_is_told_from_knowledge() -> None:
    def asked(number: int, scores: tuple[float, float], answer: int) -> Prediction:
        best = scores.index(max(scores))
        return Prediction(
            id=str(number), answer=best, correct=best == answer, confidence=1.0, scores=scores, num_tokens=(1, 1)
        )

    rows = [Choice(id=str(i), question="?", choices=("x", "y"), answer=i % 2) for i in range(4)]
    before = [asked(i, (1.0, 0.0) if i % 2 == 0 else (0.0, 1.0), i % 2) for i in range(4)]
    shifted = [asked(i, (p.scores[0] - 3.0, p.scores[1]), i % 2) for i, p in enumerate(before)]
    flipped = [asked(i, (0.0, 1.0) if i == 0 else p.scores, i % 2) for i, p in enumerate(before)]
    prior = answer_prior(before, shifted, rows, by_letter=True)
    assert (prior["retention"], prior["corrected"], prior["moved"]) == (50.0, 100.0, 50.0)
    assert prior["labels"] == {"A": [0, 2], "B": [2, 2]}
    known = answer_prior(before, flipped, rows, by_letter=False)
    assert (known["retention"], known["corrected"]) == (75.0, 75.0)
    assert set(known["labels"]) == {"x", "y"}


def test_remembered_evidence_is_a_bias_corrected_average() -> None:
    seen = iter([1.0, 3.0, 5.0])

    def inner(params: Any, refresh: int) -> evidence.Reference:
        return evidence.Reference(vectors=[[torch.tensor([next(seen)])]])

    averaged = Remembered(inner, 0.5)
    found = [float(averaged([], refresh).vectors[0][0]) for refresh in range(3)]
    assert found == pytest.approx([1.0, (0.5 * 1 + 1 * 3) / 1.5, (0.25 * 1 + 0.5 * 3 + 1 * 5) / 1.75])


# Mutations: a study's own metrics must reveal an error in the algorithm. Two metrics of E9 have known values, so no
# threshold on a training result is needed.


_refresh = attach.Guard.refresh


def _stale(guard: attach.Guard) -> evidence.Reference:
    kept = guard.gating.kept
    found = _refresh(guard)
    guard.gating.kept = kept or guard.gating.kept
    return found


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "wrong sign": (algorithm, "collaborates", lambda g, delta: (g.sign() * delta.sign() >= 0).to(torch.float32)),
    "stale gradient": (attach.Guard, "refresh", _stale),
    "missing bias correction": (algorithm, "coefficient", lambda ema, beta, t: ema.clamp(0.0, 1.0)),
}


@pytest.fixture(scope="module")
def corner(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small task whose known rows are all anchors, so that the evidence is the full-data reference."""
    path = tmp_path_factory.mktemp("corner") / "corner.jsonl"
    write_rows(path, [*world.taught("harbours")[:24], *world.untaught("harbours")[:16]])
    _, halves = split_task(models.load("toy-s", device="cpu"), str(path), "cloze")
    return {
        "task": str(path), "num_anchors": len(halves.past), "num_new": 8, "batch_size": 8, "num_past": None,
        "external": (), "diagnose": ("admission", "reference"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mutation", "shown"),
    [("none", ""), ("wrong sign", "place"), ("stale gradient", "place"), ("missing bias correction", "size")],
)
def test_a_mutated_algorithm_shows_in_a_studys_figures(
    corner: dict[str, Any], tmp_path: Path, mutation: str, shown: str
) -> None:
    specs = [
        SMOKE.at(**corner, method="cpl", num_probes=0, epochs=3),
        SMOKE.at(**corner, method="cplus", num_probes=8, epochs=1),  # one update
    ]
    with mock.patch.object(*MUTATIONS[mutation]) if mutation in MUTATIONS else nullcontext():
        assert all(ended.outcome == "done" for ended in perform(specs, tmp_path, in_this_process))
    rows = e09.summary(finished(specs, tmp_path)).rows
    cpl, cplus = ({name: found.mean for name, found in row.figures.items()} for row in rows)
    # A mask that admits what its evidence calls harmful, about 0 up to rounding: 0.38 if stale, 1 with the wrong sign.
    place = cpl["harmful admitted"] > 0.01
    # A first step of wrong size, where both are equal: 0.01 of it without bias correction.
    size = cplus["applied energy"] < 0.5 * cplus["admitted energy"]
    assert {"place": place, "size": size}[shown] if shown else not (place or size)
