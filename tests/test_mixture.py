"""New rows from several files with weights: what an epoch trains on, and what the plan and the record say about it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from toyjob import asked, same, stop_at, write_rows, written
from typer.testing import CliRunner

import cplus
from cplus.cli.app import app
from cplus.data.readers import weighted
from cplus.jobs.folder import Folder
from cplus.jobs.plan import plan
from cplus.jobs.prepare import prepare
from cplus.toy import world
from cplus.training.rows import Rows

pytestmark = pytest.mark.usefixtures("one_thread", "cache")
QUICK = {"method": "sft", "epochs": 2, "evaluate_every": 0}


@pytest.fixture
def two(here: Path) -> Path:
    """`new.jsonl` with 12 rows and `more.jsonl` with 8 others."""
    write_rows(here / "more.jsonl", list(world.untaught("harbours")[12:20]))
    return here


def rows_of(config: cplus.AdaptConfig) -> Rows:
    return prepare(config, Folder(config.out), Path.cwd()).rows


def files(folder: Path, *weights: str) -> list[str]:
    return [f"{folder / name}.jsonl{weight}" for name, weight in zip(("new", "more"), weights, strict=True)]


@pytest.mark.parametrize(("weight", "trained", "per_epoch"), [("=0.5", 4, 4), ("=2", 8, 16), ("=2.25", 8, 18)])
def test_a_weight_is_how_often_an_epoch_trains_on_the_rows_of_a_file(
    two: Path, weight: str, trained: int, per_epoch: int
) -> None:
    rows = rows_of(asked(two, new=files(two, "", weight), **QUICK))
    times = Counter(example.id for example in rows.trained.examples)
    first = [example.id for example in rows.new.examples][:12]
    assert [times[id] for id in first] == [1] * 12
    ours = {id: often for id, often in times.items() if id not in first}
    assert (len(ours), sum(ours.values())) == (trained, per_epoch)
    assert max(ours.values()) - min(ours.values()) <= 1
    assert len(rows.new.examples) == len(times)  # copies are trained on, not evaluated twice
    assert [(s.rows, s.trained, s.per_epoch) for s in rows.sources] == [(12, 12, 12), (8, trained, per_epoch)]
    assert len(rows.trained.encoded()) == 12 + per_epoch


def test_a_fraction_is_drawn_by_the_seed_and_weight_one_joins_the_files(two: Path) -> None:
    (two / "other").mkdir()
    write_rows(two / "other" / "new.jsonl", list(world.untaught("harbours")[:12]))
    twice = rows_of(asked(two, **QUICK, new=[str(two / "new.jsonl"), str(two / "other" / "new.jsonl")]))
    assert len({example.id for example in twice.new.examples}) == 24  # rows of the same id are told apart
    drawn = [rows_of(asked(two, new=files(two, "", "=0.5"), seed=seed, **QUICK)).new.examples for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    write_rows(two / "joined.jsonl", list(world.untaught("harbours")[:20]))
    joined = rows_of(asked(two, **QUICK, new=str(two / "joined.jsonl"), out=two / "joined"))
    for weights in (("", ""), ("", "=1")):
        assert rows_of(asked(two, **QUICK, new=files(two, *weights))).trained.encoded() == joined.trained.encoded()


def test_plan_record_and_resumed_job_agree_on_a_mixture(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = asked(two, **QUICK, new=files(two, "=0.5", "=2"), checkpoint_steps=1)
    planned = plan(config)
    shares = f"6 from {two / 'new.jsonl'} (weight 0.5, 12 rows); 16 from {two / 'more.jsonl'} (weight 2, 8 rows)"
    assert f"warning    New rows per epoch: {shares}." in planned.lines
    assert (planned.row["counts"]["new"], planned.row["updates_per_epoch"]) == (14, 6)
    whole = cplus.adapt(config.model_copy(update={"out": two / "whole"}))
    stop_at(8, config)
    monkeypatch.chdir(two / "out")
    run = CliRunner().invoke(app, ["adapt", "--resume", str(two / "out"), "--json"])
    assert run.exit_code == 0, run.output
    assert same(written(whole.folder), written(two / "out"))
    record = json.loads((two / "out" / "record.json").read_text())
    assert record["sources"] == planned.row["sources"]
    assert [own["per_epoch"] for own in record["sources"]] == [6, 16]
    assert f"New rows per epoch: {shares}." in record["notes"]
    assert (record["steps"], record["cost"]["training_rows"], record["counts"]["new"]) == (12, 44, 14)
    given = [text for file in files(two, "", "=0.5") for text in ("--new", file)]
    rest = ["--interface", "cloze", "--method", "sft", "--past", str(two / "past.jsonl"), "--out", str(two / "cli")]
    run = CliRunner().invoke(app, ["adapt", "toy", *given, *rest, "--plan", "--json"])
    assert (run.exit_code, json.loads(run.stdout)["counts"]["new"]) == (0, 16), run.output
    stage = CliRunner().invoke(app, ["update", str(two / "ledger"), "--model", "toy", *given])
    assert "expected one file of new rows without a weight for a stage" in str(stage.exception)


def test_files_and_weights_without_sense_are_refused(two: Path) -> None:
    refused = {"=0": r"after the file, as in b\.jsonl=0\.5, got", "=nan": "a weight above 0", "=half": "above 0",
               "=0.01": r"a weight of 0\.01 leaves none of the 8 rows of .*more\.jsonl; raise it"}  # fmt: skip
    for weight, sentence in refused.items():
        with pytest.raises(ValueError, match=sentence):
            cplus.adapt(asked(two, **QUICK, new=files(two, "", weight)))
    assert not (two / "out").exists()
    (two / "free.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    new = str(two / "new.jsonl")
    with pytest.raises(ValueError, match=r"new\.jsonl is given twice; give it once with a weight, as in .*=2"):
        cplus.adapt(asked(two, **QUICK, new=[new, new]))
    with pytest.raises(ValueError, match=r"has multiple choice .* and .*free\.jsonl has free text; learn them in two"):
        cplus.adapt(asked(two, **QUICK, new=[new, str(two / "free.jsonl")]))
    for value in (3, [], [3]):
        with pytest.raises(ValueError, match="new: expected a file or a list of files"):
            cplus.AdaptConfig(model="toy", new=value)


def test_a_file_with_a_sign_in_its_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert weighted("a=2") == ("a", 2.0)
    (tmp_path / "a=2").write_text("")
    assert weighted("a=2") == ("a=2", 1.0)
