"""Models: names, precision, identity, files."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cplus import models, toy


def test_saved_model_is_the_same_everywhere(tiny, tmp_path):
    before = models.fingerprint(tiny.model)
    models.save(tiny.model, tiny.tokenizer, tmp_path / "out")
    loaded = models.load(tmp_path / "out", device="cpu")
    assert loaded.fingerprint == before
    assert loaded.window == 512
    assert next(loaded.model.parameters()).dtype is torch.float32
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == tiny.tokenizer.chat_template
    ids = tokenizer("Where do fish live?", return_tensors="pt").input_ids
    assert torch.equal(plain(ids).logits, tiny.model(ids).logits)


def test_fingerprint_sees_one_changed_number_the_configuration_and_the_precision(tiny_llama):
    model = tiny_llama.model
    found = [models.fingerprint(model)]
    assert models.fingerprint(model) == found[0]
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-6
    found.append(models.fingerprint(model))
    model.config.rms_norm_eps = 1e-3
    found.append(models.fingerprint(model))
    found.append(models.fingerprint(model.to(torch.bfloat16)))
    assert len(set(found)) == 4


def test_bfloat16_checkpoint_gets_float32_masters(tiny_llama, tmp_path):
    models.save(tiny_llama.model.to(torch.bfloat16), tiny_llama.tokenizer, tmp_path / "out")
    assert {p.dtype for p in models.load(tmp_path / "out").model.parameters()} == {torch.float32}


def test_computing_in_bfloat16_leaves_the_weights_alone(tiny_llama):
    ids = torch.tensor([[5, 6, 7]])
    full = tiny_llama.model(ids).logits
    with models.computing("float32", torch.device("cpu")):
        assert torch.equal(tiny_llama.model(ids).logits, full)
    with models.computing("bfloat16", torch.device("cpu")):
        rounded = tiny_llama.model(ids).logits
    assert not torch.equal(rounded.float(), full)
    assert torch.allclose(rounded.float(), full, atol=0.2)
    with pytest.raises(ValueError, match="compute dtype must be float32 or bfloat16, got 'float16'"):
        models.computing("float16", torch.device("cpu"))


def test_device_by_name():
    assert models.choose_device("cpu") == torch.device("cpu")
    assert models.choose_device("auto").type in ("cuda", "mps", "cpu")
    with pytest.raises(ValueError, match=r"device must be auto or an available one \(.*cpu\), got 'tpu'"):
        models.choose_device("tpu")


def test_incomplete_and_damaged_checkpoints_are_one_sentence(tiny_llama, tmp_path):
    state = tiny_llama.model.state_dict()
    state.pop("model.layers.1.mlp.up_proj.weight")
    tiny_llama.model.save_pretrained(tmp_path, state_dict=state)
    tiny_llama.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks 1 of its weights.*up_proj"):
        models.load(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"could not load '.*': .*not fully covered; expected a complete model"):
        models.load(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", "did you mean smollm2-135m"),
        ("Qwen3-06B", "did you mean qwen3-0.6b"),
        ("./nowhere", "no such model folder"),
        ("nowhere.gguf", "no such GGUF file"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(ValueError, match=message):
        models.load(name)


def test_names_lead_to_their_places(tmp_path):
    assert models.resolve("toy") == toy.folder("toy")
    assert models.resolve("qwen3-0.6b") == models.resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    with pytest.raises(ValueError, match=r"no config\.json"):
        models.load(tmp_path)
    with pytest.raises(ValueError, match="revision applies to hub ids"):
        models.load("toy", revision="main")


def test_save_replaces_a_model_but_nothing_else(tiny_llama, tmp_path):
    out = tmp_path / "m"
    models.save(tiny_llama.model, tiny_llama.tokenizer, out)
    with torch.no_grad():
        tiny_llama.model.lm_head.weight.zero_()
    models.save(tiny_llama.model, tiny_llama.tokenizer, out)
    assert models.load(out).model.lm_head.weight.abs().sum() == 0
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not a model folder"):
        models.save(tiny_llama.model, tiny_llama.tokenizer, notes)
    assert (notes / "thesis.txt").read_text() == "years of work"


def test_failed_save_leaves_the_old_model(tiny_llama, tmp_path):
    out = tmp_path / "m"
    models.save(tiny_llama.model, tiny_llama.tokenizer, out)
    before = models.load(out).fingerprint

    class Broken:
        def save_pretrained(self, part):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        models.save(tiny_llama.model, Broken(), out)
    assert models.load(out).fingerprint == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
