"""The demo as a newcomer meets it, and the run behind it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cplus import models
from cplus.cli import demo
from cplus.data.examples import Choice
from cplus.lab import runs as run
from cplus.lab.frontier import CHOSEN
from cplus.lab.records import RunResult, load_result, save_result
from cplus.lab.runs import Comparison, set_up, split_task
from cplus.training.settings import RunSpec


@pytest.fixture(scope="module")
def base() -> models.Loaded:
    return models.load("toy")


@pytest.fixture(scope="module")
def setting(base: models.Loaded, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    spec = dataclasses.replace(demo.base_spec("sft", 0), num_probes=32, num_past=400, external_limit=50)
    return set_up(spec, base, split_task(base, spec.task, spec.interface), tmp_path_factory.mktemp("banks"))


def short(method: str) -> RunSpec:
    return dataclasses.replace(demo.base_spec(method, 0), num_probes=32, num_past=400, external_limit=50, epochs=2)


@pytest.fixture(scope="module")
def result(setting: Comparison) -> RunResult:
    return run.run(short("cplus"), setting)


def test_a_run_is_repeated_bit_for_bit_read_back_as_written_and_its_cost_counted(
    setting: Comparison, result: RunResult, tmp_path: Path
) -> None:
    again = run.run(short("cplus"), setting)
    assert dataclasses.replace(again, seconds=result.seconds, environment=result.environment) == result
    assert load_result(save_result(result, tmp_path)) == result
    sft = run.run(short("sft"), setting)
    assert (sft.extra_bytes, sft.cost["preservation_flops"]) == (0, 0)
    assert result.cost["preservation_rows"] == 2 * (8 + 32)
    assert result.cost["training_rows"] == sft.cost["training_rows"] == 2 * 96
    assert result.extra_bytes > 0


def test_a_run_of_adapters_is_measured_as_the_plain_model(setting: Comparison) -> None:
    found = run.run(dataclasses.replace(short("lora"), evaluate_every=2), setting)
    (look,) = found.curve
    assert (look["retention"], look["acquisition"]) == pytest.approx((found.retention, found.acquisition), abs=1.5)
    assert found.acquisition > 0  # none of them was right before
    assert found.counts["parameters"] > 602_000
    assert all(p.requires_grad for p in setting.base.model.parameters())


def test_a_covered_row_is_one_whose_question_stands_in_the_bank(setting: Comparison) -> None:
    written = {probe.question for probe in setting.probes if isinstance(probe, Choice)}
    asked = [example for example in setting.past.examples if isinstance(example, Choice)]
    assert setting.covered == {example.id for example in asked if example.question in written}
    assert 0 < len(setting.covered) <= len(written) == 32
    assert len(asked) == 400


def test_more_rows_than_there_are_is_an_error(setting: Comparison, base: models.Loaded, tmp_path: Path) -> None:
    found = (setting.past.interface, setting.split)
    with pytest.raises(ValueError, match="asked for 100000 initially correct examples as anchors"):
        set_up(dataclasses.replace(short("sft"), num_anchors=100_000), base, found, tmp_path)
    with pytest.raises(ValueError, match="num_new is 100000, but only"):
        set_up(dataclasses.replace(short("sft"), num_new=100_000, num_probes=0), base, found, tmp_path)


def test_json_is_one_object_on_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, small = demo.base_spec, {"epochs": 1, "num_probes": 16, "num_past": 40, "external_limit": 20}
    monkeypatch.setattr(demo, "base_spec", lambda m, s: dataclasses.replace(spec(m, s), **small))
    demo.demo(seeds=1, methods="replay,cpl", tuned="none", json=True, out=tmp_path)
    report = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in report["rows"]] == ["sft", "replay", "cpl", "cplus"]
    assert set(report["rows"][0]) == {
        "method", "tuned", "updates", "seed", "retention", "acquisition", "external", "seconds",
    }  # fmt: skip
    assert set(report["summary"]["cplus"]["retention"]) == {"mean"}  # one seed has no standard error
    assert len(list((tmp_path / "records").glob("*.json"))) == 4


def test_errors_are_shown_for_several_seeds_only(result: RunResult, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*seeds: int) -> str:
        changed = [(short(method), seed) for seed in seeds for method in ("sft", "cplus")]
        runs = [
            dataclasses.replace(
                result, spec=dataclasses.replace(spec, seed=seed), retention=result.retention - 2 * seed
            )
            for spec, seed in changed
        ]
        demo.show(runs, demo.summary(runs))
        return capsys.readouterr().out

    assert "±" not in (one := shown(0))
    assert "One seed;" in one
    assert "± 1.0" in (two := shown(0, 1))
    assert "Mean ± standard error over 2 seeds" in two


def test_the_verdict_says_who_did_not_learn() -> None:
    table = {
        method: {"retention": {"mean": kept}, "acquisition": {"mean": learned}}
        for method, kept, learned in (("sft", 70.0, 100.0), ("cpl", 80.0, 60.0), ("cplus", 90.0, 99.5))
    }
    assert demo.verdict(table).startswith("cpl learned only 60.0 %")
    table["cpl"]["acquisition"]["mean"] = 99.0
    assert "lost 30.0 %" in demo.verdict(table)
    assert "+20.0 points kept" in demo.verdict(table)
    table["sft, tuned"] = {"retention": {"mean": 94.0}, "acquisition": {"mean": 100.0}}
    table["cplus-repair, tuned"] = {"retention": {"mean": 98.0}, "acquisition": {"mean": 100.0}}
    assert demo.verdict(table).endswith("own best rate it lost 6.0 %, CPLUS with repair 2.0 %.")


def test_a_tuned_row_has_the_frontiers_rate_on_the_demos_rows() -> None:
    plain, tuned = demo.base_spec("cplus-repair", 3), demo.tuned_spec("cplus-repair", 3)
    assert tuned.lr == pytest.approx(plain.lr * CHOSEN["cplus-repair"].rate)
    assert (tuned.stop_at, tuned.beyond) == (99.0, 2)
    shared = ("task", "seed", "num_new", "num_anchors", "num_probes", "batch_size", "order", "external")
    assert [getattr(tuned, name) for name in shared] == [getattr(plain, name) for name in shared]
    assert [demo.entry(plain), demo.entry(tuned)] == ["cplus-repair", "cplus-repair, tuned"]
    with pytest.raises(ValueError, match="no rate was chosen for ogd"):
        demo.named_tuned("sft,ogd")
