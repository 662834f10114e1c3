"""`cplus repair`, `cplus adapt --repair` and `cplus.repair`: the guide's walk-through, stops, adapters, bad input."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toyjob
import yaml
from conftest import Tiny
from safetensors.torch import load_file
from typer.testing import CliRunner

import cplus
from cplus import models
from cplus.base import files
from cplus.cli.app import app
from cplus.data.examples import Example, FreeForm, Message, to_row
from cplus.distributed.processes import Interrupted
from cplus.jobs import repair as repairing
from cplus.jobs.settings import repair_settings
from cplus.receipts.contents import ModelId, Repair, TunedSet
from cplus.receipts.figures import repaired
from cplus.receipts.page import read_receipt
from cplus.receipts.verdict import repair_sentences
from cplus.toy import rows, world

PAGE = (Path(__file__).parent.parent / "docs" / "repair.md").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the guide's walk-through ran: `sft`, `repaired` and `again` beside its rows."""
    folder = tmp_path_factory.mktemp("walk")
    threads, here = torch.get_num_threads(), Path.cwd()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("CPLUS_CACHE", str(folder / "cache"))
        section = PAGE.split("## Walk-through")[1].split("\n## ")[0]
        blocks = re.findall(r"```(python|bash)\n(.*?)```", section, re.DOTALL)
        assert [kind for kind, _ in blocks] == ["bash", "python", "python"]
        for kind, text in blocks:
            if kind == "python":
                exec(compile(text, "docs/repair.md", "exec"), {})
                continue
            for line in text.splitlines():
                program, *words = shlex.split(line, comments=True)
                if program == "python":
                    assert words == ["-m", "cplus.toy.rows"]
                    rows.write(Path())
                    continue
                done = CliRunner().invoke(app, words)
                assert done.exit_code == 0, done.output
        yield folder
    torch.set_num_threads(threads)
    assert Path.cwd() == here


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def record(folder: Path) -> dict[str, Any]:
    return files.read_sealed(folder / "record.json")


def asked(**changes: Any) -> cplus.RepairConfig:
    values = {"model": "toy", "tuned": "sft/model", "new": "few.jsonl", "anchors": "keep.jsonl", "past": "near.jsonl"}
    return repair_settings(values | {"interface": "cloze", "num_probes": 8, "device": "cpu"} | changes)


@pytest.fixture(scope="module")
def few(place: Path) -> Path:
    """Fewer rows of the walk-through, for repairs of seconds."""
    (place / "few.jsonl").write_text("".join((place / "new.jsonl").read_text().splitlines(keepends=True)[:12]))
    (place / "near.jsonl").write_text("".join((place / "past.jsonl").read_text().splitlines(keepends=True)[:24]))
    return place


COMMAND = ["repair", "toy", "sft/model", "--new", "few.jsonl", "--anchors", "keep.jsonl", "--past", "near.jsonl",
           "--interface", "cloze", "--set", "num_probes=8", "--out", "whole", "--json"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(few: Path) -> dict[str, Any]:
    """What the command line printed of a repair that nothing stopped, and its exit code."""
    done = CliRunner().invoke(app, [*COMMAND, "--require", "retention>=0.85"])
    return {**json.loads(done.stdout), "exit": done.exit_code}


def test_the_walk_through_repairs_and_python_gives_the_same_model(place: Path) -> None:
    by_command, by_python = record(place / "repaired"), record(place / "again")
    assert by_command["model"]["after"] == by_python["model"]["after"]
    rows = {(row["name"], row["quantity"]): row for row in by_command["figures"]["repair"]["rows"]}
    new, past = rows["new", "Acquisition"], rows["past", "Retention"]
    assert new["tuned"] - 1 <= new["repaired"]
    assert past["repaired"] > past["tuned"] + 5  # 38 points with this seed
    assert by_command["figures"]["repair"]["helped"]
    assert past["repaired"] == by_command["figures"]["retention"]["percent"]
    sft = record(place / "sft")
    assert past["tuned"] == sft["figures"]["retention"]["percent"], "the tuned model's figure is its own job's"
    assert by_command["model"]["tuned"] == sft["model"]["after"]


def test_the_folder_holds_what_an_adapted_models_folder_holds(place: Path) -> None:
    out = place / "repaired"
    assert {path.name for path in out.iterdir()} == {
        "model", "bank", "anchors.jsonl", "receipt.html", "record.json", "README.md", "settings.json",
    }  # fmt: skip
    assert {path.name for path in (out / "model").iterdir()} == {
        path.name for path in (place / "sft" / "model").iterdir()
    }
    assert models.load(out / "model", device="cpu").fingerprint == record(out)["model"]["after"]
    receipt = read_receipt(out)
    assert receipt.repair is not None
    assert receipt.repair.undone == record(out)["repair"]["undone"]
    page, card = (out / "receipt.html").read_text(), (out / "README.md").read_text()
    assert "Base, tuned, repaired" in page
    assert "Base, tuned, repaired" not in (place / "sft" / "receipt.html").read_text()
    share = f"{100 * record(out)['repair']['share']:.1f}"
    assert f"The repair reset {share}\u00a0% of the weights that training had changed" in page
    assert "# sft/model, repaired towards toy" in card
    assert f"The repair reset {share}" in card


def test_json_is_one_object_and_a_requirement_that_is_missed_gives_exit_code_2(
    few: Path, whole: dict[str, Any]
) -> None:
    assert (whole["exit"], whole["kept"], whole["requirements"][0]["met"]) == (2, False, False)
    assert [row["name"] for row in whole["models"]] == ["new", "past"]
    assert 0 < whole["repair"]["share"] < 1
    impossible = CliRunner().invoke(app, [*COMMAND, "--out", "impossible", "--require", "past-loss<=+0.1"])
    assert impossible.exit_code == 1
    assert "past-loss" in str(impossible.exception)


def test_a_stopped_repair_is_resumed_to_the_same_weights(few: Path, whole: dict[str, Any]) -> None:
    def say(text: str) -> None:
        if "% undone" in text:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repairing, "say", say)
        with pytest.raises(Interrupted, match="cplus repair --resume stopped"):
            cplus.repair(asked(out="stopped"))
    done = CliRunner().invoke(app, ["repair", "--resume", "stopped"])
    assert done.exit_code == 0, done.output
    assert record(few / "stopped")["model"]["after"] == record(few / "whole")["model"]["after"]
    again = CliRunner().invoke(app, ["repair", "--resume", "stopped", "--json"])
    assert json.loads(again.stdout)["repair"] == whole["repair"]


def test_a_repair_and_an_adaptation_are_not_resumed_by_each_others_command(place: Path) -> None:
    for command, folder in (("repair", "sft"), ("adapt", "repaired")):
        done = CliRunner().invoke(app, [command, "--resume", folder])
        assert done.exit_code == 1
        assert "written by another command" in str(done.exception)


def test_unmerged_adapters_are_merged_and_repaired(few: Path) -> None:
    changes = {"method": "sft", "lora": "r=4,merge=false", "epochs": 4, "lr": 1e-2, "out": few / "lora"}
    toyjob.write_files(few / "cache")
    cplus.adapt(toyjob.asked(few / "cache", **changes))
    assert not (few / "lora" / "model" / "config.json").exists()
    before = hashes(few / "lora")
    done = cplus.repair(asked(tuned="lora/model", new=str(few / "cache" / "new.jsonl"), out="unloraed"), force=True)
    moved = done.record["repair"]["moved"]
    assert 0 < moved < done.record["counts"]["parameters"], "embeddings have no adapters"
    assert hashes(few / "lora") == before
    models.load(few / "unloraed" / "model", device="cpu")


def spoken(fact: Example) -> Example:
    """A fact of the toy world as free text."""
    row = to_row(fact)
    return FreeForm(
        id=fact.id,
        messages=(Message(role="user", content=str(row["question"])),),
        response=str(row["choices"][row["answer"]]),
    )


def test_a_merge_keeps_the_new_rows_and_is_written_as_it_is_in_memory(few: Path) -> None:
    """The weights lie between both models block by block, and the recipe for mergekit says where."""
    done = cplus.repair(asked(by="merge", out="merged"))
    found, rows = done.record["repair"]["merged"], done.record["figures"]["repair"]["rows"]
    figures = {(row["name"], row["quantity"]): row for row in rows}
    new, past = figures["new", "Acquisition"], figures["past", "Retention"]
    assert new["repaired"] >= new["tuned"] - 1
    assert past["repaired"] > past["tuned"]
    assert found["divergence"]["repaired"] <= min(found["divergence"]["even"], found["divergence"]["tuned"] / 2)
    assert models.load("merged/model", device="cpu").fingerprint == done.record["model"]["after"]
    base, tuned, merged = (
        load_file(models.resolve(name) / "model.safetensors")  # type: ignore[operator]
        for name in ("toy", "sft/model", "merged/model")
    )
    for block, share in found["blocks"].items():
        for name in (name for name in merged if name.startswith(f"{block}.")):
            assert torch.equal(merged[name], torch.lerp(base[name].float(), tuned[name].float(), share)), name
    assert 0 < min(found["blocks"].values()) < 1
    recipe = yaml.safe_load(Path("merged/model/mergekit.yml").read_text())
    assert recipe["base_model"] == "toy"
    layers = [one["sources"][1]["parameters"]["weight"][-1]["value"] for one in recipe["slices"]]
    assert layers == [found["blocks"][f"model.layers.{i}"] for i in range(len(layers))]
    assert "Each block's weights are base + a (tuned - base)" in Path("merged/README.md").read_text()
    with pytest.raises(ValueError, match="there is nothing to undo"):
        cplus.repair(asked(by="merge", tuned="toy", out="none"))
    with pytest.raises(ValueError, match="a merge is written in the precision of the tuned model"):
        asked(by="merge", save_dtype="bfloat16")


def test_free_text_is_kept_by_its_loss(few: Path) -> None:
    # The anchors stay multiple choice: the little model writes no probes in free text.
    untaught = world.untaught("harbours")
    facts = {"f-new": untaught[:12], "f-held": untaught[40:46], "f-past": world.taught("harbours")[8:20]}
    for name, own in facts.items():
        toyjob.write_rows(few / f"{name}.jsonl", [spoken(fact) for fact in own])
    given = {"new": "f-new.jsonl", "past": "f-past.jsonl", "validation": "f-held.jsonl", "plain": True,
             "max_new_tokens": 4}  # fmt: skip
    cplus.adapt(toyjob.asked(few, anchors=None, method="sft", out=few / "f-sft", epochs=4, **given))
    done = cplus.repair(asked(tuned="f-sft/model", out="f-repaired", **given))
    assert done.record["repair"]["trials"] <= 14
    levels = {own["name"]: own for own in done.record["repair"]["new"]}
    assert set(levels) == {"new", "validation"}
    for own in levels.values():
        assert own["unit"] == "nats per token"
        assert own["repaired"] <= own["limit"]
    new = levels["new"]
    assert new["limit"] == pytest.approx(new["tuned"] + 0.05 * (new["base"] - new["tuned"]))
    rows = {row["name"]: row for row in done.record["figures"]["repair"]["rows"]}
    assert rows["new"]["quantity"] == rows["past"]["quantity"] == "loss"
    assert rows["new"]["tuned"] == pytest.approx(new["tuned"], abs=1e-4)
    assert rows["new"]["repaired"] == pytest.approx(new["repaired"], abs=1e-4)


def test_an_adaptation_repairs_its_model_as_its_last_step(few: Path) -> None:
    config = toyjob.asked(few, new="few.jsonl", anchors="keep.jsonl", past="near.jsonl", method="sft", num_probes=8,
                          repair=True, out=few / "with", stop="learned", epochs=25, lr=1.5e-3)  # fmt: skip
    done = cplus.adapt(config).record
    found = done["repair"]
    assert 0 < found["share"] < 1
    assert found["past"]["repaired"] < found["past"]["tuned"]
    assert done["counts"]["probes"] == 8, "a method without probes gets a bank for the repair"
    [note] = [note for note in done["notes"] if note.startswith("Repair after training: ")]
    assert f"{100 * found['share']:.1f} % of the moved weights undone" in note
    assert note in (few / "with" / "receipt.html").read_text()
    assert models.load(few / "with" / "model", device="cpu").fingerprint == done["model"]["after"]
    assert done["seconds"]["repairing"] > 0


def test_an_adaptation_without_anything_to_repair_is_written_with_the_reason(few: Path) -> None:
    config = toyjob.asked(few, new="few.jsonl", anchors="keep.jsonl", past="near.jsonl", repair=True, epochs=1,
                          lr=1e-30, out=few / "without")  # fmt: skip
    done = cplus.adapt(config).record
    assert done["repair"] == {"refused": "base and tuned model have the same weights, so there is nothing to undo"}
    assert any(note.startswith("NOT REPAIRED: base and tuned") for note in done["notes"])
    assert done["model"]["after"] == done["model"]["before"]
    with pytest.raises(ValueError, match="'cplus-repair' ends with a repair of its own; leave out repair"):
        cplus.adapt(config.model_copy(update={"method": "cplus-repair"}), force=True)


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for changes, sentence in (
        ({"repair": True, "anchors": None, "keep": ("none",), "method": "sft"}, "repair needs rows the model should"),
        ({"repair": True, "lora": "r=4,merge=false"}, "leave out merge=false, or repair"),
    ):
        with pytest.raises(ValueError, match=sentence):
            toyjob.asked(tmp_path, **changes)
    for changes, sentence in (
        ({"anchors": None, "keep": ("none",)}, "a repair needs rows the base model should keep"),
        ({"lr": 1e-3}, "a repair trains nothing, so it has no use for lr"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"rounds": 2}, "'rounds' is not a setting"),
    ):
        with pytest.raises(ValueError, match=sentence):
            asked(**changes)


def refused(config: cplus.RepairConfig, sentence: str) -> None:
    """The repair is refused, its folder is not there, and the tuned model is as it was."""
    before = hashes(Path("sft"))
    with pytest.raises(ValueError, match=sentence) as error:
        cplus.repair(config)
    assert str(error.value).count("\n") == 0
    assert not config.out.exists() or config.out == Path("sft")
    assert hashes(Path("sft")) == before


def test_models_that_are_not_a_pair_are_refused(few: Path, tiny_llama: Tiny) -> None:
    refused(asked(tuned="toy-s", out="bad"), "base and tuned model differ in")
    refused(asked(tuned="toy", out="bad"), "base and tuned model have the same weights, so there is nothing to undo")
    models.save(tiny_llama.model, tiny_llama.tokenizer, few / "llama")
    refused(asked(tuned="llama", out="bad"), r"the vocabularies of base and tuned model differ in [\d,]+ tokens")
    loaded = models.load("sft/model", device="cpu")
    models.save(loaded.model, loaded.tokenizer, few / "other")
    config = json.loads((few / "other" / "config.json").read_text())
    (few / "other" / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    refused(asked(tuned="other", out="bad"), "not of one architecture: hidden_act is 'silu' in the base and 'relu'")


def test_a_tokenizer_that_splits_otherwise_is_refused(few: Path) -> None:
    loaded = models.load("sft/model", device="cpu")
    models.save(loaded.model, loaded.tokenizer, few / "split")
    path = few / "split" / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["normalizer"] = {"type": "Lowercase"}
    raw["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    path.write_text(json.dumps(raw))
    refused(asked(tuned="split", out="bad"), "split the row .* into different tokens")


def test_rows_that_the_base_model_knows_leave_nothing_to_keep(few: Path) -> None:
    toyjob.write_rows(few / "right.jsonl", list(world.taught("harbours")[30:36]))
    refused(asked(new="right.jsonl", out="bad"), "the base model already answers every one of 6 new rows correctly")


def test_the_output_folder_may_not_hold_the_tuned_model(few: Path) -> None:
    with pytest.raises(ValueError, match="expected a folder of its own for the repaired model, but it holds sft/model"):
        cplus.repair(asked(out="sft"), force=True)
    refused(asked(out="sft"), "holds a finished job")
    done = CliRunner().invoke(app, ["repair", "toy", "sft", *COMMAND[3:]])
    assert "did you mean sft/model?" in str(done.exception)


def test_a_repair_that_did_not_help_says_so() -> None:
    tuned = ModelId(name="tuned", fingerprint="f")
    repair = Repair(tuned=tuned, undone=1, moved=4, sets=(TunedSet(name="past", retention=80.0, right=80.0),))
    own = {"name": "past", "kind": "retention", "retention": {"percent": 79.0}, "nll": None}
    found = repaired(repair, [own])
    assert found["helped"] is False
    assert repair_sentences(found) == [
        "The repair reset 25.0\u00a0% of the weights that training had changed; from tuned to repaired: "
        "Retention on past 80.0\u00a0% to 79.0\u00a0%.",
        "It did not improve the past rows measured here.",
    ]
    loss = {"name": "past", "kind": "retention", "retention": None, "after": None, "nll": {"before": 0.5, "after": 0.6}}
    better = repaired(Repair(tuned=tuned, undone=1, moved=4, sets=(TunedSet(name="past", nll=0.7),)), [loss])
    assert better["helped"] is True
    assert len(repair_sentences(better)) == 1
    assert repaired(repair, [])["helped"] is None
