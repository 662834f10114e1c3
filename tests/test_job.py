"""`cplus adapt` from rows to a finished folder, and everything that may go wrong on the way."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import types
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from toyjob import asked, same, stop_at, write_files, write_rows, written
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import cplus
from cplus import toy
from cplus.cli.app import app
from cplus.core.rows import Encoded
from cplus.data.examples import Choice, FreeForm, Message
from cplus.jobs import memory
from cplus.jobs.adapt import resume
from cplus.jobs.folder import FinishedJob, Folder, claimed
from cplus.jobs.progress import TrainingView
from cplus.models import fingerprint, load
from cplus.receipts.figures import figures
from cplus.receipts.page import read_receipt
from cplus.receipts.verdict import headline, of_figures
from cplus.toy import world
from cplus.training.loop import EpochEnded, Stepped, rate_factor
from cplus.training.measure import repeats_every_token

pytestmark = pytest.mark.usefixtures("one_thread", "cache")


ALSO: dict[str, Any] = {"require": ["retention>=0.2"], "external": ["plants"], "external_limit": 8, "evaluate_rows": 64}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedJob:
    """The job that most tests compare theirs with, from a folder whose model card names the model it comes from."""
    folder = tmp_path_factory.mktemp("finished")
    write_files(folder)
    base = shutil.copytree(toy.folder("toy"), folder / "base")
    (base / "README.md").write_text("---\nbase_model: owner/tiny\nlicense: mit\n---\n\n# Tiny\n", encoding="utf-8")
    return cplus.adapt(asked(folder, model=str(base), **ALSO))


def settings_file(here: Path, config: cplus.AdaptConfig) -> list[str]:
    """The command's options for a file of these settings."""
    path = here / "run.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    return ["adapt", "--config", str(path)]


def test_a_finished_folder_is_whole_and_its_figures_are_the_receipts(finished: FinishedJob) -> None:
    out = finished.folder
    names = {entry.name for entry in out.iterdir() if not entry.name.startswith(".")}
    kept = {"bank", "anchors.jsonl"}
    assert names == {"settings.json", "model", "record.json", "receipt.html", "README.md"} | kept
    record, receipt = json.loads((out / "record.json").read_text()), read_receipt(out)
    assert record["figures"] == json.loads(json.dumps(figures(receipt)))
    assert [own.kind for own in receipt.sets] == ["acquisition", "retention", "external"]
    assert [len(own.rows) for own in receipt.sets] == [12, 24, 8]
    assert [point.epoch for point in receipt.curve] == [0, 1, 2, 3]
    assert all(point.retention is not None and point.acquisition is not None for point in receipt.curve)
    assert {own.name for own in receipt.gate} >= {"layer 0", "layer 3", "embed_tokens"}
    assert receipt.audit is not None
    assert receipt.audit["probes"] == record["counts"]["probes"] == 8
    assert record["steps"] == 9
    assert 0 < record["curve"][0]["admitted"] < 1
    # 3 refreshes over 4 anchors and 8 probes, 3 epochs over 12 rows
    assert (record["cost"]["preservation_rows"], record["cost"]["training_rows"]) == (36, 36)
    assert record["cost"]["training_flops"] == 6 * record["counts"]["parameters"] * record["cost"]["training_padded"]
    card = (out / "README.md").read_text()
    assert f"**{headline(record['figures'])}**" in card
    assert "Continual Learning via Self-Probe Gradients" in card
    front = yaml.safe_load(card.split("---\n", 2)[1])
    assert (front["base_model"], front["license"]) == ("owner/tiny", "mit")
    assert record["settings"] == asked(out.parent, model=str(out.parent / "base"), **ALSO).model_dump(mode="json")
    # With all rows in every evaluation the curve ends where the headline is.
    assert receipt.followed == {"new": 12, "past": 24}
    assert receipt.curve[-1].acquisition == pytest.approx(record["figures"]["acquisition"]["percent"])
    assert receipt.curve[-1].retention == pytest.approx(record["figures"]["retention"]["percent"])
    assert "Rows behind each point: new 12, past 24" in (out / "receipt.html").read_text(encoding="utf-8")
    actual, seconds = record["actual"], record["seconds"]
    assert all(spent > 0 for spent in seconds.values())
    first = seconds.pop("first_update")
    assert actual["total_seconds"] == pytest.approx(sum(seconds.values()))
    assert sum(seconds[part] for part in ("loading", "writing probes")) < first < actual["total_seconds"]
    assert actual["training_tokens_per_epoch"] * 3 == record["cost"]["training_padded"]
    assert actual["evidence_tokens_per_epoch"] * 3 == record["cost"]["preservation_padded"]
    assert actual["peak_bytes"] is None or actual["peak_bytes"] >= 0
    # The model is the one that was measured, in plain transformers.
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    AutoTokenizer.from_pretrained(out / "model")
    assert fingerprint(model) == record["model"]["after"] != record["model"]["before"]
    assert model.dtype == torch.float32
    assert oct((out / "model" / "model.safetensors").stat().st_mode & 0o777) == "0o644"


def test_a_notebook_shows_a_job_as_a_small_table(finished: FinishedJob) -> None:
    shown, figures = finished._repr_html_(), finished.record["figures"]
    assert escape(headline(figures)) in shown
    assert str(finished.folder / "receipt.html") in shown
    past = next(own for own in figures["sets"] if own["name"] == "past")
    for when in ("before", "after"):
        assert f">{past[when]['percent']:.1f} %<" in shown
    assert len(repr(read_receipt(finished.folder))) < len(str(finished.folder)) + 160
    assert len(shown) < 4000
    assert "<script" not in of_figures("<script>", figures, {"<script>": "<script>"})


def test_requirements_decide_the_exit_code(here: Path, finished: FinishedJob) -> None:
    # A rate below every weight's last bit: no answer changes, so what was right is kept and nothing is learned.
    still = {"method": "sft", "lr": 1e-12, "epochs": 1, "evaluate_every": 0}
    unmet = cplus.adapt(asked(here, **still, require=["retention>=0.5", "acquisition>=0.5"]))
    figures = unmet.record["figures"]
    assert (figures["retention"]["percent"], figures["acquisition"]["percent"]) == (100.0, 0.0)
    assert figures["requirements"][0]["bound"] == figures["retention"]["low"] / 100
    for done, met, code in ((finished, [True], 0), (unmet, [True, False], 2)):
        assert [r["met"] for r in done.record["figures"]["requirements"]] == met
        run = CliRunner().invoke(app, ["adapt", "--resume", str(done.folder), "--json"])
        printed = json.loads(run.stdout)
        assert (run.exit_code, printed["kept"], done.kept) == (code, not code, not code)
        assert printed["retention"] == done.record["figures"]["retention"]


def test_a_learned_job_ends_early_and_the_command_says_what_was_kept(here: Path) -> None:
    base = ["adapt", "toy", "--new", str(here / "new.jsonl"), "--anchors", str(here / "keep.jsonl")]
    rest = ["--interface", "cloze", "--lr", "2e-3", "--batch-size", "4", "--num-probes", "8", "--out", str(here / "o")]
    run = CliRunner().invoke(app, [*base, *rest, "--json", "--require", "acquisition>=0.5"])
    assert run.exit_code == 0, run.output
    printed = json.loads(run.stdout)
    assert printed["acquisition"]["percent"] == 100
    assert 1 <= printed["epochs"] < 25
    assert any("on the 4 anchors alone" in note for note in printed["notes"])
    assert "epoch 1/25: loss" in run.stderr
    again = CliRunner().invoke(app, [*base, *rest])
    assert isinstance(again.exception, ValueError)
    assert "holds a finished job; choose another out, or --force" in str(again.exception)


def test_python_yaml_and_the_command_line_are_one_job(here: Path, finished: FinishedJob) -> None:
    run = CliRunner().invoke(
        app, [*settings_file(here, asked(here, out=here / "wrong")), "--out", str(here / "second"), "--json"]
    )
    assert run.exit_code == 0, run.output
    assert same(written(finished.folder), written(here / "second"))
    assert not (here / "wrong").exists()


def test_a_split_draws_what_the_base_model_knows(here: Path) -> None:
    rows = [*world.untaught("plants")[:10], *world.taught("plants")[:14]]
    write_rows(here / "task.jsonl", list(rows))
    values = {"new": None, "anchors": None, "past": None, "split": str(here / "task.jsonl"), "num_anchors": 3}
    done = cplus.adapt(asked(here, **values, num_new=4, method="replay", epochs=1))
    assert done.record["counts"]["new"] == 4
    assert done.record["counts"]["anchors"] == 3
    sets = {own["name"]: own for own in done.record["figures"]["sets"]}
    assert sets["new"]["before"]["percent"] == 0
    assert sets["past"]["before"]["percent"] == 100
    assert not (done.folder / "bank").exists()


def test_the_bank_is_reused_and_a_given_one_must_be_sealed_for_the_same_anchors(
    here: Path, cache: Path, finished: FinishedJob
) -> None:
    count = len(list((cache / "banks").glob("bank-*")))
    given = cplus.adapt(asked(here, bank=finished.folder / "bank"))
    assert len(list((cache / "banks").glob("bank-*"))) == count
    assert same(written(finished.folder), written(given.folder))
    write_rows(here / "keep.jsonl", list(world.taught("plants")[:4]))
    with pytest.raises(ValueError, match="was sealed for 4 anchors"):
        cplus.adapt(asked(here, bank=finished.folder / "bank", out=here / "three"))


@pytest.mark.parametrize("merge", [True, False])
def test_adapters_are_gated_and_written_merged_or_apart(here: Path, merge: bool) -> None:
    done = cplus.adapt(asked(here, lora={"r": 4, "merge": merge}, epochs=2, lr=5e-3, checkpoint_steps=2))
    counts = done.record["counts"]
    assert 0 < counts["trainable"] < counts["parameters"] / 2
    assert (done.folder / "model" / "adapter_config.json").is_file() != merge
    model = AutoModelForCausalLM.from_pretrained(done.folder / "model")
    assert done.record["figures"]["acquisition"]["percent"] > 0
    if merge:
        assert fingerprint(model) == done.record["model"]["after"]


def test_free_form_rows_are_scored_by_likelihood_and_judged(here: Path) -> None:
    def free(facts: list[Choice]) -> list[Any]:
        turns = [(f.id, f"Question: {f.question}\nAnswer:", f.right) for f in facts]
        return [FreeForm(id=id, messages=(Message(role="user", content=q),), response=a) for id, q, a in turns]

    write_rows(here / "new.jsonl", free(world.untaught("plants")[:6]))
    write_rows(here / "keep.jsonl", free(world.taught("plants")[:3]))
    write_rows(here / "past.jsonl", free(world.taught("plants")[3:8]))
    judged = {"judge": "regex:.", "max_new_tokens": 4, "interface": None, "plain": True}
    done = cplus.adapt(asked(here, method="cpl", epochs=2, stop="learned", evaluate_rows=3, **judged))
    sets = {own["name"]: own for own in done.record["figures"]["sets"]}
    assert sets["new"]["interface"] == sets["past"]["interface"] == "freeform"
    assert sets["new"]["nll"]["after"] < sets["new"]["nll"]["before"]
    assert sets["past"]["nll"]["rows"] == 5
    point = done.record["curve"][-1]
    assert {"new_nll", "past_nll", "loss"} <= set(point)
    receipt = read_receipt(done.folder)
    rows = {row.id: row for found in receipt.sets for row in found.rows if found.name == "new"}
    seen = [rows[example.id] for example in random.Random("0/new").sample(list(rows.values()), 3)]
    tokens = sum(row.tokens or 0 for row in seen)
    start = sum((row.nll_before or 0) * (row.tokens or 0) for row in seen) / tokens
    assert receipt.curve[0].new_nll == pytest.approx(start, rel=1e-5)  # the same rows as the later evaluations


def test_bfloat16_computes_otherwise_and_keeps_float32_masters(here: Path) -> None:
    plain = cplus.adapt(asked(here, method="cpl", epochs=2, evaluate_every=0, out=here / "a"))
    low = cplus.adapt(asked(here, method="cpl", epochs=2, evaluate_every=0, out=here / "b", compute_dtype="bfloat16"))
    a, b = written(plain.folder), written(low.folder)
    assert not same(a, b)
    assert all(value.dtype == torch.float32 for value in b.values())
    moved = {name: (a[name] - value).abs().max() for name, value in load("toy").model.state_dict().items()}
    assert all((a[name] - b[name]).abs().max() <= 2.5 * moved[name] + 1e-6 for name in a)
    assert low.record["curve"][1]["loss"] < 0.8 * low.record["curve"][0]["loss"]  # stale casts repeat the first loss


# What may go wrong


def test_gradient_checkpointing_computes_more_and_changes_nothing(
    here: Path, finished: FinishedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    recomputed: list[object] = []
    kept = transformers.modeling_utils.checkpoint
    monkeypatch.setattr(
        transformers.modeling_utils, "checkpoint", lambda *given, **how: recomputed.append(1) or kept(*given, **how)
    )
    again = cplus.adapt(asked(here, gradient_checkpointing=True))
    assert recomputed
    assert same(written(finished.folder), written(again.folder))


def test_special_tokens_copies_and_anchors_among_the_new_rows_are_counted_and_said(here: Path) -> None:
    first, *others = rows = world.untaught("harbours")[:12]
    write_rows(here / "keep.jsonl", [*rows[1:3], *world.taught("harbours")[:2]])
    special = replace(first, question=f"<|endoftext|>{first.question}")
    write_rows(here / "new.jsonl", [special, *others, replace(rows[3], id="again")])
    said = cplus.adapt(asked(here, method="cpl", epochs=1, evaluate_every=0)).record["notes"]
    [note] = [note for note in said if "special tokens" in note]
    assert note.startswith("1 of 13 new rows hold special tokens of the model in their text, such as <|endoftext|>,")
    assert "1 of 13 new rows ask what another one asks." in said
    assert "2 of 4 anchors are also new rows: training changes what they protect." in said


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": "cplu"}, "unknown method 'cplu'; did you mean cplus"),
        ({"anchors": None, "keep": ("none",)}, "method 'cplus' needs anchors"),
        ({"method": "distillation", "anchors": None, "keep": ("none",)}, "method 'distillation' needs anchors"),
        ({"new": "nowhere.jsonl"}, "there is no such file"),
        ({"interface": "freeform"}, "has multiple-choice rows; expected the interface letter or cloze"),
        ({"external": ["plants", "plants"]}, "expected external tasks of different names"),
        ({"interface": "letter"}, "expected a tokenizer with a chat template"),
    ],
)
def test_a_job_that_cannot_work_is_refused_before_anything_is_written(
    here: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        cplus.adapt(asked(here, **changes))
    assert sentence in str(error.value)
    assert not (here / "out").exists()


def test_a_folder_of_something_else_is_never_replaced(here: Path) -> None:
    (here / "out").mkdir()
    (here / "out" / "README.md").write_text("mine")
    for force in (False, True):
        with pytest.raises(ValueError, match="is not a job's folder, so nothing in it is replaced"):
            cplus.adapt(asked(here), force=force)
    assert (here / "out" / "README.md").read_text() == "mine"


def test_force_replaces_a_job_and_nothing_else(here: Path) -> None:
    config = asked(here, method="sft", epochs=1, evaluate_every=0)
    cplus.adapt(config)
    (here / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="there is no such file"):
        cplus.adapt(config.model_copy(update={"new": "nowhere.jsonl"}), force=True)
    assert (here / "out" / "record.json").is_file()  # nothing is lost to settings that cannot work
    again = cplus.adapt(config.model_copy(update={"seed": 1}), force=True)
    assert again.record["settings"]["seed"] == 1
    assert (here / "out" / "notes.txt").read_text() == "mine"


def test_a_folder_in_use_is_refused(here: Path) -> None:
    with claimed(Folder(here / "out")), pytest.raises(ValueError, match="is in use by process"):
        cplus.adapt(asked(here, method="sft"))


def test_too_little_memory_or_disk_is_said_before_loading(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cplus.models.load", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(memory, "available", lambda device: 1_000_000)
    with pytest.raises(ValueError, match=r"toy needs 0\.01\d GB for weights.*0\.001 GB are free; train adapters"):
        cplus.adapt(asked(here))
    monkeypatch.undo()
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1))
    with pytest.raises(ValueError, match=r"checkpoints and model need .* GB are free; make room"):
        cplus.adapt(asked(here))
    assert not (here / "out").exists()


def test_an_unmeasurable_requirement_is_refused_before_training(here: Path) -> None:
    write_rows(here / "past.jsonl", [replace(f, answer=(f.answer + 1) % 4) for f in world.taught("plants")[:3]])
    with pytest.raises(ValueError, match="the base model answered none of 3 rows correctly"):
        cplus.adapt(asked(here, require=["retention>=0.5"], method="sft"))
    with pytest.raises(ValueError, match=r"acquisition>=0.95 cannot be met: .* 0\.\d+ when all \d+ rows are right"):
        cplus.adapt(asked(here, require=["acquisition>=0.95"], method="sft", out=here / "two"))


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_state(
    here: Path, finished: FinishedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cplus.methods import objectives

    calls = iter(range(100))
    real = objectives.mean_backward

    def broken(*args: Any, **rest: Any) -> Any:
        loss, work = real(*args, **rest)
        return (float("nan") if next(calls) == 4 else loss), work

    monkeypatch.setattr(objectives, "mean_backward", broken)
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 5; .*update 4 is kept in .*checkpoint\.pt"):
        cplus.adapt(asked(here))
    assert not (here / "out" / "record.json").exists()
    monkeypatch.undo()
    assert same(written(resume(here / "out").folder), written(finished.folder))


# Stopping and resuming


@pytest.mark.parametrize(
    ("number", "moment"), [(signal.SIGINT, {"epoch": 2, "step": 5}), (signal.SIGTERM, {"epoch": 2, "step": 6})]
)
def test_a_signal_saves_and_a_resumed_job_is_bitwise_the_whole_one(
    here: Path,
    finished: FinishedJob,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    moment: dict[str, int],
) -> None:
    real, kind = TrainingView.show, EpochEnded if moment["step"] == 6 else Stepped

    def show(self: TrainingView, event: Any, *rest: Any) -> None:
        real(self, event, *rest)
        if isinstance(event, kind) and (event.epoch, event.step) == (moment["epoch"], moment["step"]):
            os.kill(os.getpid(), number)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(TrainingView, "show", show)
    run = CliRunner().invoke(app, settings_file(here, asked(here, **ALSO)))
    monkeypatch.undo()
    assert run.exit_code == 128 + number
    assert (
        f"stopped after update {moment['step']} of 9, and saved. Continue with: cplus adapt --resume {here / 'out'}"
        in run.stderr
    )
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    with pytest.raises(ValueError, match="holds an unfinished job: --resume"):
        cplus.adapt(asked(here))
    done = resume(here / "out")
    assert same(written(finished.folder), written(done.folder))
    assert done.record["figures"] == finished.record["figures"]
    assert done.record["curve"] == finished.record["curve"]
    cost = {name: value for name, value in done.record["cost"].items() if name != "seconds"}
    assert cost.items() <= finished.record["cost"].items()


@pytest.mark.parametrize(
    ("method", "lora"),
    [
        ("shuffled", None),  # its own random numbers
        ("ogd", None),  # evidence of the base model, taken once
        ("cpl", "r=2,dropout=0.5"),  # torch's random numbers; frozen weights that no checkpoint holds
    ],
)
def test_every_kind_of_method_goes_on_bitwise(here: Path, method: str, lora: str | None) -> None:
    options = {"evaluate_every": 0, "checkpoint_steps": 1, "optimizer": "sgd", "lr": 0.05}
    config = asked(here, method=method, lora=lora, **options)
    whole = cplus.adapt(config.model_copy(update={"out": here / "whole"}))
    stop_at(4, config)
    assert same(written(whole.folder), written(resume(here / "out").folder))


def test_resume_refuses_changed_rows_other_settings_and_a_damaged_checkpoint(here: Path) -> None:
    stop_at(None, asked(here, method="sft", epochs=1))
    run = CliRunner().invoke(app, ["adapt", "--resume", str(here / "out"), "--lr", "1"])
    assert "use the settings the job started with" in str(run.exception)
    with pytest.raises(ValueError, match="there is no job to resume"):
        resume(here)
    new = (here / "new.jsonl").read_text()
    write_rows(here / "new.jsonl", list(world.untaught("plants")[:12]))
    with pytest.raises(ValueError, match="the new changed since the job began"):
        resume(here / "out")
    (here / "new.jsonl").write_text(new)
    path = here / "out" / "work" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="expected a complete file, but it cannot be read"):
        resume(here / "out")


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_job_goes_on_with_fewer_gpus_and_from_another_folder(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
    gpus: int,
) -> None:
    monkeypatch.chdir(here)
    relative = {"new": "new.jsonl", "past": "past.jsonl", "anchors": "keep.jsonl", "out": "out"}
    stop_at(None, asked(here, method="sft", epochs=1, **relative))
    path = here / "out" / "work" / "checkpoint.pt"
    kept = torch.load(path, weights_only=True)
    kept["state"]["random_cuda"] = [torch.tensor([10, 11]), torch.tensor([20, 21])]
    torch.save(kept, path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert resume(here / "out").record["counts"]["new"] == 12
    assert f"the job began with 2 GPUs and continues with {gpus}" in capsys.readouterr().err


# Parts


def test_the_rate_rises_and_falls_as_its_course_says() -> None:
    for course, last in (
        ("constant", 1.0),
        ("linear", 0.1),
        ("cosine", (1 + torch.cos(torch.tensor(0.9 * torch.pi))) / 2),
    ):
        factors = [rate_factor(step, total=14, warmup=4, kind=course) for step in range(14)]
        assert factors[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
        assert factors[-1] == pytest.approx(float(last))
        assert sorted(factors[4:], reverse=True) == factors[4:]


def test_learned_means_that_decoding_repeats_every_token(make_tiny: Any) -> None:
    model = make_tiny("qwen3").model
    prompt = (5, 6, 7)
    said: list[int] = []
    for _ in range(3):
        ids = torch.tensor([[*prompt, *said]])
        said.append(int(model(input_ids=ids).logits[0, -1].argmax()))
    right = Encoded(prompt, tuple(said))
    wrong = Encoded(prompt, (*said[:2], said[2] ^ 1))
    assert repeats_every_token(model, [right, right])
    assert not repeats_every_token(model, [right, wrong])
    assert repeats_every_token(model, [Encoded(prompt, (*said[:2], said[2] ^ 1), (True, True, False))])


def test_the_plan_counts_what_the_job_will_use_and_writes_nothing(
    here: Path, cache: Path, finished: FinishedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPLUS_CACHE", str(here / "cache"))
    plan = [*settings_file(here, asked(here, **ALSO)), "--plan"]
    run = CliRunner().invoke(app, [*plan, "--json"])
    assert run.exit_code == 0, run.output
    planned = json.loads(run.stdout)
    assert not (here / "out").exists()
    record = finished.record
    assert planned["size"]["parameters"] == record["counts"]["parameters"]
    assert planned["counts"] == {"new": 12, "anchors": 4, "probes": 8}
    assert planned["updates_per_epoch"] * 3 == record["steps"]
    tokens, cost = planned["tokens_per_epoch"], record["cost"]
    assert tokens["training"] == tokens["sft"]
    assert tokens["training"] * 3 == pytest.approx(cost["training_padded"], rel=0.1)  # each epoch shuffles anew
    # Probes are still to be written.
    assert tokens["evidence"] * 3 == pytest.approx(cost["preservation_padded"], rel=0.3)
    assert tokens["percent_above_sft"] == pytest.approx(100 * tokens["evidence"] / tokens["sft"])
    assert planned["need"]["gate"] == cost["extra_bytes"]
    assert set(planned["seconds"]) == {"starting", "loading", "evaluating", "writing probes", "saving", "training"}
    assert all(seconds > 0 for seconds in planned["seconds"].values())
    assert planned["total_seconds"] == pytest.approx(sum(planned["seconds"].values()))
    monkeypatch.setenv("CPLUS_CACHE", str(cache))
    told = CliRunner().invoke(app, [*plan, "--out", "o"]).stdout
    assert "% FLOPs against plain fine-tuning" in told
    assert "writing probes" not in told  # the finished job has written the bank
    assert "o/receipt.html" in told


class Recorder:
    """What a tracker's package would be called with."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def init(self, **options: Any) -> Recorder:
        self.options = options
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished = True


def test_a_tracker_gets_every_update_and_every_epoch(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder)  # type: ignore[arg-type]
    cplus.adapt(asked(here, method="cpl", epochs=2, report_to="wandb"))
    steps = [step for values, step in recorder.logged if "train/loss" in values]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [step for values, step in recorder.logged if "epoch/retention" in values] == [3, 6]
    assert sum("evidence/anchors" in values for values, _ in recorder.logged) == 2
    assert recorder.finished
    assert recorder.options["project"] == "cplus"
    assert recorder.options["resume"] == "allow"


def test_a_missing_tracker_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="reporting to wandb needs its package: pip install wandb"):
        cplus.adapt(asked(here, method="sft", report_to="wandb"))
    monkeypatch.setitem(sys.modules, "peft", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="needs the package peft"):
        cplus.adapt(asked(here, method="sft", lora="r=2", out=here / "two"))
