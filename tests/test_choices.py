"""Settings that choose themselves, the divergence from the base, and the upload to the hub."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from toyjob import asked, write_files
from transformers import GenerationConfig

import cplus
from cplus import models
from cplus.core.losses import divergences
from cplus.jobs.folder import Folder
from cplus.jobs.memory import Footprint, ModelSize
from cplus.jobs.prepare import choose, preflight, rate_by_size, stored
from cplus.jobs.rows import read
from cplus.jobs.settings import CHOSEN, AdaptConfig, settings
from cplus.methods.table import METHODS
from cplus.receipts.page import read_receipt
from cplus.training import measure

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

ROWS = [{"prompt": f"Say {i}.", "response": f"{i} it is."} for i in range(40)]


def unset(folder: Path, **changes: Any) -> AdaptConfig:
    """The toy job with the settings left out that choose themselves."""
    values = asked(folder, **changes).model_dump()
    dropped = set(CHOSEN) - changes.keys()
    return settings({name: value for name, value in values.items() if name not in dropped})


# What is chosen


def test_the_rate_falls_with_the_models_size() -> None:
    rates = [rate_by_size(size) for size in (600_000, 134_515_008, 600_000_000, 4_000_000_000, 70_000_000_000)]
    assert rates == [4e-4, 3e-5, 1e-5, 6e-6, 1e-6]
    assert rate_by_size(134_515_008, adapters=True) == 3e-4


def chosen(folder: Path, monkeypatch: pytest.MonkeyPatch, *, free: int, bf16: bool = False, **changes: Any) -> Any:
    (folder / "free.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = unset(folder, anchors=None, past=None, interface=None, new=str(folder / "free.jsonl"), **changes)
    size = ModelSize(parameters=135_000_000, trainable=135_000_000, stored_dtype="float32", activation_bytes=80)
    need = Footprint(held=20, peak=100, available=free, gate=0, checkpoint=0, disk=0, free=0)
    monkeypatch.setattr(models, "choose_device", lambda name: torch.device("cuda" if bf16 else "cpu"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
    config, found = choose(config, read(config, METHODS["cplus"], folder), size, need)
    return config, {own.name: own.why for own in found}


def test_what_is_not_given_is_chosen_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {"stop": "learned", "batch_size": 8}
    config, why = chosen(tmp_path, monkeypatch, free=50, bf16=True, **quick)
    assert [getattr(config, name) for name in CHOSEN] == [3e-5, 12, 4, "bfloat16", True]
    assert "60 updates of 8 of the 40 new rows" in why["epochs"]
    config, why = chosen(tmp_path, monkeypatch, free=100, **quick)
    assert (config.compute_dtype, config.gradient_checkpointing) == ("float32", False)
    assert set(why) == {"lr", "epochs", "evaluate_every"}
    assert chosen(tmp_path, monkeypatch, free=100, **{**quick, "stop": "lost:0.1"})[0].evaluate_every == 1
    given = {"lr": 1e-3, "epochs": 2, "compute_dtype": "float32", "gradient_checkpointing": False}
    assert chosen(tmp_path, monkeypatch, free=50, bf16=True, **given, **quick)[1] == {}
    with pytest.raises(ValueError, match=r"the default learning rate is AdamW's, but the optimizer is sgd; provide lr"):
        chosen(tmp_path, monkeypatch, free=50, optimizer="sgd")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "divergence"),
        ({"keep": "general", "past": "free.jsonl"}, "divergence"),
        ({"method": "cplus"}, "cplus"),
        ({"beta": 0.5}, "cplus"),
        ({"lora": "r=4"}, "cplus"),
        ({"anchors": "free.jsonl"}, "cplus"),
        ({"keep": ("general", "free.jsonl")}, "cplus"),
        ({"new": "harbours", "interface": "cloze"}, "cplus"),
    ],
)
def test_free_text_with_nothing_given_to_keep_is_learned_beside_its_divergence(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    (tmp_path / "free.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = settings({"model": "toy", "new": "free.jsonl", "out": tmp_path / "out", "device": "cpu", **changes})
    found = preflight(config, tmp_path)
    why = {own.name: own for own in found.chosen}
    plain = rate_by_size(601_536, adapters=config.lora is not None)
    if name == "cplus":
        assert (found.method.name, found.config.method, found.config.lr) == ("cplus", "cplus", plain)
        assert not {"method", "strength"} & why.keys()
        return
    assert (found.method.name, found.config.method, found.config.strength) == ("divergence", "divergence", 2.0)
    assert found.config.lr == 2 * plain
    assert "at equal learning a chat model moved less than under cplus, or as far, at less cost" in why["method"].why
    assert "twice that for divergence" in why["lr"].why
    again = preflight(found.config, tmp_path)  # as a job that is resumed
    assert (again.method.name, again.config, again.chosen) == ("divergence", found.config, ())


# The divergence from the base model


def test_the_divergence_is_that_of_the_whole_distribution_where_it_is_small_enough() -> None:
    base, moved, rows = tiny.lm(0), tiny.lm(1), tiny.rows(9, longest_target=5)
    reference = measure.base_rows(base, rows)
    exact = divergences(moved, base, rows).detach() * torch.tensor([len(row.target) for row in rows])
    expected = float(exact.sum()) / sum(len(row.target) for row in rows)
    assert measure.divergence(moved, reference) == pytest.approx(expected, rel=1e-4)
    assert measure.divergence(base, reference) == pytest.approx(0.0, abs=1e-6)


def test_the_divergence_is_in_curve_and_receipt(tmp_path: Path) -> None:
    write_files(tmp_path)
    done = cplus.adapt(asked(tmp_path))
    points = [point["divergence"] for point in done.record["curve"]]
    assert 0 < points[0] < points[-1]
    shown = read_receipt(tmp_path / "out")
    assert [point.divergence for point in shown.curve] == [0.0, *points]
    assert "Divergence from the base model on new rows" in (tmp_path / "out" / "receipt.html").read_text()


# What is shipped


def test_the_chat_template_and_the_generation_settings_are_written_back(tmp_path: Path, tiny_llama: Any) -> None:
    tiny_llama.model.generation_config = GenerationConfig(do_sample=True, top_p=0.85, temperature=0.6, eos_token_id=1)
    models.save(tiny_llama.model, tiny_llama.tokenizer, tmp_path / "base")
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:4]))
    done = cplus.adapt(
        settings(
            {
                "model": str(tmp_path / "base"), "new": str(tmp_path / "new.jsonl"), "out": tmp_path / "out",
                "method": "sft", "keep": "none", "epochs": 1, "max_new_tokens": 2, "device": "cpu",
            }
        )
    )  # fmt: skip
    assert done.record["chosen"][0]["name"] == "lr"
    loaded = models.load(str(tmp_path / "out" / "model"), device="cpu")
    assert loaded.tokenizer.chat_template == tiny_llama.tokenizer.chat_template
    before, after = (
        json.loads((tmp_path / own / "generation_config.json").read_text()) for own in ("base", "out/model")
    )
    assert after == before
    assert after["top_p"] == 0.85
    assert [asdict(own) for own in stored(Folder(tmp_path / "out").settings)] == done.record["chosen"]
