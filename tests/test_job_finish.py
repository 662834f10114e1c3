"""Jobs that end early, run longer or keep their best epoch, and the settings that decide which rows and turns train."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from toyjob import asked, same, stop_at, write_rows, written
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import cplus
from cplus.cli.app import app
from cplus.data.interfaces import Rejected
from cplus.data.prompts import read_template
from cplus.jobs.adapt import resume
from cplus.jobs.checkpoint import badness
from cplus.jobs.compare import compare
from cplus.jobs.folder import Folder
from cplus.jobs.plan import plan
from cplus.jobs.prepare import Job, prepare
from cplus.jobs.progress import TrainingView
from cplus.probes import labels
from cplus.probes.labels import Label
from cplus.receipts.verdict import headline
from cplus.toy import world
from cplus.training.driver import Training

TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '<|endoftext|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
CONSTANT = {"lr_schedule": "constant", "evaluate_every": 0}

pytestmark = pytest.mark.usefixtures("one_thread", "cache")


def prepared(config: cplus.AdaptConfig) -> Job:
    """Everything before the first file is written."""
    return prepare(config, Folder(config.out), Path.cwd())


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# Running longer


def test_a_job_resumed_with_more_epochs_is_bitwise_one_that_began_with_them(here: Path) -> None:
    whole = cplus.adapt(asked(here, method="cpl", epochs=3, **CONSTANT, out=here / "whole"))
    for step, out in ((2, here / "early"), (None, here / "out")):
        stop_at(step, asked(here, method="cpl", epochs=2, **CONSTANT, checkpoint_steps=1, out=out))
        run = CliRunner().invoke(app, ["adapt", "--resume", str(out), "--epochs", "3", "--json"])
        assert run.exit_code == 0, run.output
        assert same(written(whole.folder), written(out))
        record = json.loads((out / "record.json").read_text())
        assert (record["steps"], record["epochs"], record["settings"]["epochs"]) == (9, 3, 3)
        assert record["unfinished"] is None
    with pytest.raises(ValueError, match="this job is finished, so its epochs cannot change"):
        resume(here / "out", epochs=4)
    assert resume(here / "out", epochs=3).record["steps"] == 9


def test_keep_best_writes_the_weights_of_the_best_epoch(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = Training._end_epoch, {}

    def epoch(self: Training, number: int, *rest: Any) -> None:
        real(self, number, *rest)
        seen[number] = {name: value.clone() for name, value in self.weights().items()}
        if number == 2:
            self.scheduler.base_lrs = [0.05]  # from here on training ruins the model

    monkeypatch.setattr(Training, "_end_epoch", epoch)
    done = cplus.adapt(asked(here, method="sft", epochs=3, lr_schedule="constant", keep_best=True))
    curve = done.record["curve"]
    assert curve[2]["retention"] < curve[1]["retention"]
    best = int(min(curve, key=lambda point: badness(point) or 0.0)["epoch"])
    assert best < 3
    assert same(seen[best], written(done.folder))
    assert not same(seen[3], written(done.folder))
    assert f"The weights are those of epoch {best}, the best on past and new rows." in done.record["notes"]


@pytest.mark.parametrize(
    ("name", "settings", "remedy"),
    [
        ("best.pt", {"keep_best": True}, "remove it to write the best of the epochs from the checkpoint on"),
        ("good.pt", {"stop": "lost:0.000001", "lr": 0.05}, "the last good epoch is lost: start a new job"),
    ],
)
def test_damaged_weights_of_another_epoch_are_never_written(
    here: Path, name: str, settings: dict[str, Any], remedy: str
) -> None:
    stop_at(None, asked(here, method="sft", **settings))
    path = here / "out" / "work" / name
    whole = path.read_bytes()
    half = len(whole) // 2
    for damaged in (whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :], whole[:half]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{name}: expected a complete file, but it cannot be read .*; {remedy}"):
            resume(here / "out")
        assert not (here / "out" / "model").exists()
    if name == "best.pt":
        path.unlink()
        assert resume(here / "out").record["steps"] == 9


def test_a_stopped_comparison_goes_on_from_its_last_checkpoint(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = cplus.adapt(asked(here, method="cpl", checkpoint_minutes=1e-9))
    shutil.copytree(done.folder, here / "whole")
    whole = compare(here / "whole").record["receipt"]["beside"]
    stop_at(2, done.folder, compare)
    assert (done.folder / "beside" / "checkpoint.pt").is_file()
    real, steps = TrainingView.show, []

    def show(self: TrainingView, event: Any, *rest: Any) -> None:
        steps.append(event.step)
        real(self, event, *rest)

    monkeypatch.setattr(TrainingView, "show", show)
    again = compare(done.folder).record["receipt"]["beside"]
    assert (min(steps), max(steps)) == (3, whole["updates"])
    assert {**again, "seconds": 0} == {**whole, "seconds": 0}
    assert not (done.folder / "beside").exists()


def test_damaged_answers_of_the_base_model_are_measured_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = cplus.adapt(asked(here, method="sft", out=here / "whole"))
    stop_at(3, asked(here, method="sft", checkpoint_steps=1))
    answers = here / "out" / "work" / "before.json"
    answers.write_bytes(answers.read_bytes()[:1000])
    assert resume(here / "out").record["figures"] == whole.record["figures"]
    assert "before.json" in capsys.readouterr().err


# Which rows are held out


def test_validation_rows_are_measured_and_never_trained_on(here: Path) -> None:
    new = list(world.untaught("harbours"))
    write_rows(here / "held.jsonl", [new[20], new[3], new[5]])
    with pytest.raises(ValueError, match="2 of 3 validation rows are also new rows, the first is") as error:
        cplus.adapt(asked(here, method="sft", validation=str(here / "held.jsonl")))
    assert repr(new[3].id) in str(error.value)
    assert not (here / "out").exists()
    write_rows(here / "held.jsonl", new[12:18])
    files = {"--new": "new", "--past": "past", "--validate": "held"}
    rows = [word for flag, name in files.items() for word in (flag, str(here / f"{name}.jsonl"))]
    rest = ["--interface", "cloze", "--method", "sft", "--epochs", "1", "--lr", "1e-3", "--out", str(here / "out")]
    run = CliRunner().invoke(app, ["adapt", "toy", *rows, *rest, "--json"])
    assert run.exit_code == 0, run.output
    record = json.loads((here / "out" / "record.json").read_text())
    assert (record["counts"]["new"], record["counts"]["validation"]) == (12, 6)
    assert record["cost"]["training_rows"] == 12
    assert "validation" in record["curve"][0]
    assert [own["kind"] for own in record["figures"]["sets"]] == ["acquisition", "validation", "retention"]


@pytest.mark.parametrize(("count", "validation", "held"), [(50, None, 5), (50, "none", 0), (49, None, 0)])
def test_a_tenth_of_fifty_new_rows_is_held_out(here: Path, count: int, validation: str | None, held: int) -> None:
    write_rows(here / "new.jsonl", list(world.untaught("harbours")[:count]))
    rows = prepared(asked(here, method="sft", validation=validation)).rows
    assert len(rows.new.examples) == count - held
    found = () if rows.validation is None else rows.validation.examples
    assert len(found) == held
    assert not {example.id for example in found} & {example.id for example in rows.new.examples}
    assert any("held out" in note for note in rows.notes) == bool(held)


# Free text


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of two turns to learn, one-turn rows to keep, and a chat template for the toy."""
    folder = tmp_path_factory.mktemp("chat")
    new, known = world.untaught("plants"), world.taught("plants")
    conversations = [
        {
            "messages": [
                {"role": role, "content": text}
                for fact in pair
                for role, text in (("user", fact.question), ("assistant", fact.right))
            ]
        }
        for pair in zip(new[:4], new[4:8], strict=True)
    ]
    write_lines(folder / "new.jsonl", conversations)
    kept = [{"question": fact.question, "reply": fact.right} for fact in known[:8]]
    write_lines(folder / "keep.jsonl", [{"prompt": row["question"], "response": row["reply"]} for row in kept[:3]])
    write_lines(folder / "past.jsonl", [{"prompt": row["question"], "response": row["reply"]} for row in kept[3:]])
    write_lines(folder / "named.jsonl", kept)
    write_lines(folder / "requests.jsonl", [{"prompt": row["question"]} for row in kept])
    (folder / "chat.jinja").write_text(TEMPLATE)
    return folder


def free(chat: Path, **changes: Any) -> cplus.AdaptConfig:
    values = {"method": "cpl", "epochs": 1, "interface": None, "max_new_tokens": 4} | changes
    return asked(chat, chat_template=chat / "chat.jinja", **values)


def test_free_text_without_a_judge_is_judged_by_losses(chat: Path) -> None:
    talked = cplus.adapt(free(chat, save_dtype="bfloat16"))
    figures = talked.record["figures"]
    assert figures["retention"] is figures["acquisition"] is None
    past, new = figures["free"]["past"], figures["free"]["new"]
    assert past["loss"]["low"] <= past["loss"]["rise"] <= past["loss"]["high"]
    assert past["rows"] == 5
    assert new["loss"]["after"] < new["loss"]["before"]
    assert figures["learned"]["given"]["rows"] == new["rows"]
    line = headline(figures)
    assert f"answers as given, loss {new['loss']['before']:.3f} to {new['loss']['after']:.3f}" in line
    assert "Kept" not in line
    assert f"**{line}**" in (talked.folder / "README.md").read_text()
    # The weights are written in the precision of the settings.
    found = AutoModelForCausalLM.from_pretrained(talked.folder / "model", dtype="auto")
    assert {value.dtype for value in found.state_dict().values()} == {torch.bfloat16}


@pytest.mark.parametrize("turns", ["all", "last"])
def test_the_assistants_turns_train(chat: Path, turns: str) -> None:
    job = prepared(free(chat, turns=turns, out=chat / turns))
    tokenizer = job.base.tokenizer
    for example, row in zip(job.rows.new.examples, job.rows.new.encoded(), strict=True):
        scored = row.scored or (True,) * len(row.target)
        text = tokenizer.decode([token for token, learned in zip(row.target, scored, strict=True) if learned])
        first, last = example.messages[1].content, example.response
        expected = f"{first}<|endoftext|>{last}<|endoftext|>" if turns == "all" else f"{last}<|endoftext|>"
        assert text.replace(" ", "") == expected.replace(" ", "")


def test_columns_of_other_names_are_read(chat: Path) -> None:
    given = {name: str(chat / "named.jsonl") for name in ("new", "past")}
    config = free(chat, method="sft", anchors=None, **given, columns="prompt=question,response=reply")
    rows = prepared(config).rows
    assert [example.response for example in rows.new.examples] == [fact.right for fact in world.taught("plants")[:8]]
    with pytest.raises(ValueError, match=r"named\.jsonl:1: expected the column 'wording' for prompt"):
        prepared(free(chat, method="sft", anchors=None, **given, columns="prompt=wording,response=reply"))


def test_a_chat_template_that_is_missing_or_broken_is_refused_before_the_model_is_loaded(
    chat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cplus.models.load", lambda *_, **__: pytest.fail("loaded"))
    (chat / "latin.jinja").write_bytes("{{ messages }} \xe4".encode("latin-1"))
    (chat / "open.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    (chat / "other.jinja").write_text("<html></html>")
    for name, sentence in (
        ("none.jinja", "expected a file with a chat template .*No such file"),
        ("latin.jinja", "expected a file with a chat template .*utf-8"),
        ("open.jinja:2", "expected a file with a chat template in Jinja: "),
        ("other.jinja", "never reads the variable messages"),
    ):
        file = chat / name.partition(":")[0]
        with pytest.raises(ValueError, match=f"{name}: .*{sentence}"):
            cplus.adapt(free(chat).model_copy(update={"chat_template": file, "out": chat / "refused"}))
    assert not (chat / "refused").exists()


def test_templates_with_the_tags_of_transformers_are_read(tmp_path: Path) -> None:
    text = "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}{% generation %}{{ m.content }}"
    text += "{% endgeneration %}{% endfor %}"
    (tmp_path / "tags.jinja").write_text(text)
    assert read_template(tmp_path / "tags.jinja") == text


def test_requests_alone_get_the_models_own_answers(chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path))
    given = {name: str(chat / "requests.jsonl") for name in ("anchors", "past")}
    with pytest.raises(ValueError, match=r"requests\.jsonl:1"):
        prepared(free(chat, **given))

    def label(model: Any, interface: Any, examples: Any, **_: Any) -> list[Label | Rejected]:
        own = [Label(interface.with_answer(e, "mauve"), 1.0) for e in examples]
        return [Rejected("answer without end") if found.example.id.endswith("2") else found for found in own]

    monkeypatch.setattr(labels, "label", label)
    rows = prepared(free(chat, **given, own_answers=True)).rows
    assert rows.anchors is not None
    assert [example.response for example in rows.anchors.examples] == ["mauve"] * 7
    assert plan(free(chat, **given, own_answers=True)).row["counts"]["anchors"] == 7
    assert "The past rows hold the base model's own answers; left out without a complete answer: 1." in rows.notes
    monkeypatch.undo()
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "other"))
    # The toy never ends its turn under this template, and four times the usual limit exceeds its window.
    with pytest.raises(ValueError, match="none of the 8 anchors rows was answered before the token limit"):
        prepared(free(chat, **given, own_answers=True))
