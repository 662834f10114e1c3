"""Jobs without anchors, training that stops before it hurts, and the check of any fine-tuned model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chatty
import pytest
import torch
from toyjob import asked, write_files
from typer.testing import CliRunner

import cplus
from cplus import models
from cplus.cli.app import app
from cplus.data.readers import read_file
from cplus.probes.bank import Bank
from cplus.probes.settings import input_key
from cplus.receipts.page import read_receipt

pytestmark = pytest.mark.usefixtures("one_thread")


def alone(folder: Path, **changes: Any) -> Any:
    """A job of seconds with nothing but new rows."""
    write_files(folder)
    return asked(folder, anchors=None, past=None, max_new_tokens=2, epochs=1, **changes)


def test_a_job_with_nothing_but_new_rows_keeps_what_the_model_writes(cache: Path, tmp_path: Path) -> None:
    done = cplus.adapt(alone(tmp_path))
    out = tmp_path / "out"
    anchors, past = read_file(out / "anchors.jsonl"), read_file(out / "past.jsonl")
    bank = Bank.load(out / "bank", anchors=anchors)
    assert (len(anchors), len(past), len(bank.probes)) == (8, 28, 8)
    seen = {input_key(row, options=False) for row in (*anchors, *bank.examples)}
    assert not seen & {input_key(row, options=False) for row in past}
    assert done.record["figures"]["free"]["past"]["loss"]["rows"] == 28
    assert "past_nll" in done.record["curve"][0]
    assert any("wrote and answered the rows to keep (general) itself: 28 held out" in n for n in done.record["notes"])
    assert "wrote and answered the rows to keep (general) itself" in (out / "README.md").read_text()
    assert bank.manifest["parts"][0]["held_out"] == 28
    # Plain fine-tuning is measured on the same rows, so the two compare.
    plain = cplus.adapt(alone(tmp_path, method="sft", out=tmp_path / "sft"))
    assert read_file(tmp_path / "sft" / "past.jsonl") == past
    assert plain.record["rows"]["retention"] == done.record["rows"]["retention"]
    # A later job protects the self-written anchors like any others.
    later = cplus.adapt(alone(tmp_path, kept=(out,), out=tmp_path / "later", keep=("general",)))
    assert any("1 earlier past tasks are protected" in note for note in later.record["notes"])


def test_a_job_that_moves_no_weight_changes_no_answer_and_no_loss(cache: Path, tmp_path: Path) -> None:
    chatty.write(tmp_path / "chatty")
    rows = [{"prompt": f"What is {i} plus 2?", "response": f"It is {i + 2}."} for i in range(8)]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"model": str(tmp_path / "chatty"), "new": str(tmp_path / "talk.jsonl"), "interface": None, "plain": False}
    figures = cplus.adapt(alone(tmp_path, **given, lr=1e-30)).record["figures"]
    [past] = [own for own in figures["sets"] if own["name"] == "past"]
    assert past["answers"] == {"same": 28, "changed": 0}
    assert (past["nll"]["rise"], figures["divergence"]["after"]) == (0.0, 0.0)
    assert figures["free"]["new"]["loss"]["rise"] == 0.0
    assert figures["learned"]["nothing"] is True
    assert [one["verdict"] for one in figures["lines"]] == ["not judged", "not judged", "kept"]


def test_nothing_to_keep_is_refused_unless_the_method_needs_nothing(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs anchors.* or keep general"):
        cplus.adapt(alone(tmp_path, keep=("none",)))
    with pytest.raises(ValueError, match=r"keeping json needs a chat template"):
        cplus.adapt(alone(tmp_path, keep=("json",)))
    with pytest.raises(ValueError, match=r"are multiple choice, and self-written rows are free text"):
        cplus.adapt(alone(tmp_path, keep=("general", str(tmp_path / "keep.jsonl"))))
    with pytest.raises(ValueError, match=r"stop lost:0.1 needs past rows to measure on"):
        cplus.adapt(alone(tmp_path, method="sft", keep=("none",), stop="lost:0.1"))


# Stop before it hurts


def test_training_stops_before_more_is_lost_and_writes_the_state_before(cache: Path, tmp_path: Path) -> None:
    write_files(tmp_path)
    same = {"method": "sft", "lr": 4e-3, "lr_schedule": "constant", "warmup_steps": 0}

    def run(name: str, **changes: Any) -> dict[str, Any]:
        return dict(cplus.adapt(asked(tmp_path, out=tmp_path / name, **{**same, **changes})).record)

    free = run("free", epochs=4)
    lost = [1 - point["retention"] / 100 for point in free["curve"]]
    # The first epoch that loses more than all before it, and a limit between the two.
    first = next(i for i in range(1, 4) if lost[i] > max(lost[:i]))
    limit = (max(lost[:first]) + lost[first]) / 2
    stopped = run("stopped", epochs=4, stop=f"lost:{limit}")
    assert len(stopped["curve"]) == first + 1
    assert stopped["model"]["after"] == run("before", epochs=first)["model"]["after"]
    assert any(f"The weights are those of epoch {first}" in note for note in stopped["notes"])
    assert read_receipt(tmp_path / "stopped").curve[-1].retention == pytest.approx(100 * (1 - lost[first]))
    at_once = run("once", epochs=4, stop=f"lost:{lost[0] / 2}")
    assert len(at_once["curve"]) == 1
    assert at_once["model"]["after"] == at_once["model"]["before"]
    assert any("The weights are the base model's" in note for note in at_once["notes"])


# The check of a fine-tuned model


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["check", *arguments, "--device", "cpu"])


def test_a_check_tells_a_damaged_model_from_its_base(cache: Path, tmp_path: Path) -> None:
    loaded = models.load("toy", device="cpu")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(0.2 * parameter.std() * torch.randn(parameter.shape, generator=torch.manual_seed(0)))
    models.save(loaded.model, loaded.tokenizer, tmp_path / "tuned")
    same = invoke("toy", "toy", "--require", "past-loss<=+0.01", "--num-probes", "8")
    assert same.exit_code == 0, same.output
    assert "moved 0.000 nats per token (KL) from its base at 8 held-out past rows" in same.stdout
    assert "Both models have the same weights." in same.stdout
    options = ("--require", "past-loss<=+0.05", "--num-probes", "8", "--out", str(tmp_path / "receipt"))
    damaged = invoke("toy", str(tmp_path / "tuned"), *options, "--json")
    assert damaged.exit_code == 2
    found = json.loads(damaged.stdout)
    assert found["divergence"]["after"] > 100 * found["divergence"]["q8_0"]
    assert found["requirements"][0]["met"] is False
    assert found["loss"]["rows"] == 8
    assert len(read_receipt(tmp_path / "receipt").sets[0].rows) == 8


def test_a_check_refuses_what_it_cannot_compare(cache: Path, tmp_path: Path, tiny_llama: Any) -> None:
    models.save(tiny_llama.model, tiny_llama.tokenizer, tmp_path / "other")
    assert "has another vocabulary than toy" in str(
        invoke("toy", str(tmp_path / "other"), "--num-probes", "8").exception
    )
    rubbish = invoke(str(tmp_path / "other"), "toy", "--num-probes", "8")
    assert "It cannot show by itself what to keep (general): give rows with --anchors FILE" in str(rubbish.exception)
    assert "no judge was chosen" in str(invoke("toy", "toy", "--require", "retention>=0.9").exception)
