"""A base model in 4 bits with adapters on top: trained, resumed, merged or written apart, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toyjob import asked, same, stop_at, written
from transformers import AutoModelForCausalLM

import cplus
from cplus.jobs.adapt import finish, resume
from cplus.jobs.plan import plan
from cplus.jobs.prepare import preflight
from cplus.methods.adapters import lora, merged
from cplus.models import fingerprint, load, loading

pytestmark = pytest.mark.usefixtures("one_thread", "cache")


def four(here: Path, **changes: Any) -> cplus.AdaptConfig:
    values = {"load": "4bit", "lora": {"r": 4}, "method": "cpl", "epochs": 2, "lr": 5e-3, "evaluate_every": 0}
    return asked(here, **(values | changes))


def test_what_4_bits_cannot_do_is_refused_before_anything_is_loaded(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="load 4bit trains adapters alone, as 4 bits hold no small update; add lora"):
        four(here, lora=None)
    with pytest.raises(ValueError, match="adapters written apart stay float32; leave out save_dtype, got bfloat16"):
        four(here, lora={"merge": False}, save_dtype="bfloat16")
    monkeypatch.setattr("cplus.models.load", lambda *_, **__: pytest.fail("loaded"))
    for package in ("bitsandbytes", "accelerate", "peft"):
        monkeypatch.setattr(loading, "find_spec", lambda name, absent=package: name != absent or None)
        with pytest.raises(ImportError, match=rf"in 4 bits needs the package {package}: pip install 'cplus\[bnb\]'"):
            cplus.adapt(four(here))
    assert not (here / "out").exists()
    monkeypatch.setattr(loading, "find_spec", lambda name: True)
    loading.check(torch.device("cpu"))
    with pytest.raises(ValueError, match="needs a device of cuda or cpu, got mps; choose another device, or leave out"):
        loading.check(torch.device("mps"))


def test_the_base_is_packed_and_the_plan_knows_its_size(here: Path) -> None:
    base, full = load("toy", dtype="4bit", device="cpu"), load("toy", device="cpu")
    parameters = sum(p.numel() for p in full.model.parameters())
    assert loading.num_weights(base.model) == loading.num_weights(full.model) == parameters
    held = [p for p in base.model.parameters() if p.dtype == torch.uint8]
    assert 2 * sum(p.numel() for p in held) == loading.packable(full.model)
    assert {p.dtype for p in base.model.parameters()} == {torch.uint8, torch.float32}
    assert base.fingerprint != full.fingerprint
    assert base.fingerprint == load("toy", dtype="4bit", device="cpu").fingerprint
    found, plain = (preflight(config, here) for config in (four(here), four(here, load="float32")))
    saved = round((4 - loading.BYTES_PER_WEIGHT) * loading.packable(full.model))
    assert abs(plain.need.held - found.need.held - saved) <= 1
    assert f"{loading.packable(full.model):,} held in 4 bits" in "\n".join(plan(four(here)).lines)


@pytest.mark.usefixtures("processor")
def test_adapters_are_merged_into_the_expanded_weights_exactly() -> None:
    base = load("toy", dtype="4bit", device="cpu").model
    model: Any = lora(base, 0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(5, 25).reshape(2, 10)
    with torch.no_grad():
        before = model.eval()(ids).logits
        plain: Any = merged(model)
        after = plain(ids).logits
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(("processor", "merge"), [(True, True), (False, False)], indirect=["processor"])
def test_a_job_trains_on_a_4_bit_base(here: Path, merge: bool) -> None:
    done = cplus.adapt(four(here, lora={"r": 4, "merge": merge}))
    counts, out = done.record["counts"], done.folder
    base = load("toy", device="cpu").model
    assert counts["parameters"] == loading.num_weights(base) + counts["trainable"]
    assert any("loaded in 4 bits (NF4)" in note for note in done.record["notes"])
    assert done.record["curve"][-1]["loss"] < done.record["curve"][0]["loss"]
    assert (out / "model" / "adapter_config.json").is_file() != merge
    if merge:
        model = AutoModelForCausalLM.from_pretrained(out / "model")
        assert fingerprint(model) == done.record["model"]["after"]
        assert "quantization_config" not in json.loads((out / "model" / "config.json").read_text())


def test_a_resumed_job_has_the_same_bits_and_a_finished_one_the_checkpoints(here: Path) -> None:
    whole = cplus.adapt(four(here, out=here / "whole", save_dtype="bfloat16"))
    config = four(here, checkpoint_steps=1, save_dtype="bfloat16")
    stop_at(4, config)
    state = torch.load(here / "out" / "work" / "checkpoint.pt", weights_only=True)["state"]["weights"]
    assert all("lora_" in name for name in state)  # the packed base is not repeated
    resume(here / "out")
    assert same(written(whole.folder), written(here / "out"))
    stop_at(4, config.model_copy(update={"out": here / "short"}))
    assert finish(here / "short").record["unfinished"] == {"updates": 4, "planned": 6}
