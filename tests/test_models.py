"""Models: names, precision, identity, files."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cplus import models, toy


def test_saved_model_is_the_same_everywhere(tiny, tmp_path):
    before, out = models.fingerprint(tiny.model), tmp_path / "out"
    models.save(tiny.model, tiny.tokenizer, out)
    loaded = models.load(out, device="cpu")
    assert (loaded.fingerprint, loaded.window) == (before, 512)
    assert next(loaded.model.parameters()).dtype is torch.float32
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == tiny.tokenizer.chat_template
    ids = tokenizer("Where do fish live?", return_tensors="pt").input_ids
    assert torch.equal(plain(ids).logits, tiny.model(ids).logits)


def test_fingerprint_sees_one_changed_number_the_configuration_and_the_precision(tiny_llama, tmp_path):
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
    models.save(model, tiny_llama.tokenizer, tmp_path / "out")  # a checkpoint in bfloat16 gets float32 masters
    assert {p.dtype for p in models.load(tmp_path / "out").model.parameters()} == {torch.float32}


def test_devices_and_precisions_by_name_leave_the_weights_alone(tiny_llama):
    ids, cpu = torch.tensor([[5, 6, 7]]), models.choose_device("cpu")
    assert models.choose_device("auto").type in ("cuda", "mps", "cpu")
    with pytest.raises(ValueError, match=r"device must be auto or an available one \(.*cpu\), got 'tpu'"):
        models.choose_device("tpu")
    full = tiny_llama.model(ids).logits
    with models.computing("float32", cpu):
        assert torch.equal(tiny_llama.model(ids).logits, full)
    with models.computing("bfloat16", cpu):
        rounded = tiny_llama.model(ids).logits
    assert not torch.equal(rounded.float(), full)
    assert torch.allclose(rounded.float(), full, atol=0.2)
    with pytest.raises(ValueError, match="compute dtype must be float32 or bfloat16, got 'float16'"):
        models.computing("float16", cpu)


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


def test_names_lead_to_their_places_or_are_refused(tmp_path):
    assert models.resolve("toy") == toy.folder("toy")
    assert models.resolve("qwen3-0.6b") == models.resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    for name, message in {
        "smolm2-135m": "did you mean smollm2-135m",
        "Qwen3-06B": "did you mean qwen3-0.6b",
        "./nowhere": "no such model folder",
        "nowhere.gguf": "no such GGUF file",
        str(tmp_path): r"no config\.json",
    }.items():
        with pytest.raises(ValueError, match=message):
            models.load(name)
    with pytest.raises(ValueError, match="revision applies to hub ids"):
        models.load("toy", revision="main")


def test_save_replaces_a_model_whole_and_nothing_else(tiny_llama, tmp_path):
    out, notes = tmp_path / "m", tmp_path / "notes"
    models.save(tiny_llama.model, tiny_llama.tokenizer, out)
    with torch.no_grad():
        tiny_llama.model.lm_head.weight.zero_()

    class Broken:
        def save_pretrained(self, part):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        models.save(tiny_llama.model, Broken(), out)
    assert models.load(out).model.lm_head.weight.abs().sum() > 0
    models.save(tiny_llama.model, tiny_llama.tokenizer, out)
    assert models.load(out).model.lm_head.weight.abs().sum() == 0
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    notes.mkdir()
    (notes / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not a model folder"):
        models.save(tiny_llama.model, tiny_llama.tokenizer, notes)
    assert (notes / "thesis.txt").read_text() == "years of work"
