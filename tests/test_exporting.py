"""GGUF files: what is exported loads again with the same weights, tokens and answers, and the rest is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from cplus import models as cplus_models
from cplus.cli.app import app
from cplus.models import exporting, gguf

PROMPTS = [
    "Say 12 words.",
    "Hello",
    "Three  spaces   here",
    "line\n\n1 next",
    "é ü 漢字",
    "a",
    "tabs\tand 007",
    "?!",
    "x=1;",
    "end.",
]


def folder_of(make_tiny: Callable[[str], Any], family: str, out: Path) -> Path:
    """A tiny model with a byte-level BPE tokenizer of its own, saved."""
    tiny = make_tiny(family)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate(["<|end|>", *alphabet, "th", "ab"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", bos_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    tiny.model.resize_token_embeddings(len(vocabulary) + 3)  # rows beyond the tokenizer's, as real models have
    tiny.model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_exported_model_comes_back_with_the_same_weights_tokens_and_answers(
    make_tiny: Callable[[str], Any], family: str, tmp_path: Path
) -> None:
    folder = folder_of(make_tiny, family, tmp_path / "model")
    found = exporting.write_gguf(folder, tmp_path / "model.gguf", "float32")
    assert (found["architecture"], found["splits_text_as"]) == (family, "smollm")
    was = cplus_models.load(str(folder), device="cpu")
    # transformers itself
    own = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    for name, value in was.model.state_dict().items():
        assert torch.equal(own.state_dict()[name], value), name
    # and our own reader, tokenizer included
    (tmp_path / "back").mkdir()
    gguf.convert(tmp_path / "model.gguf", tmp_path / "back")
    now = cplus_models.load(str(tmp_path / "back"), device="cpu")
    assert now.tokenizer.chat_template == was.tokenizer.chat_template
    for prompt in PROMPTS:
        ids = was.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert now.tokenizer(prompt, add_special_tokens=False)["input_ids"] == ids
        answers = [
            model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
            # transformers takes heads of 128 for every Qwen3 file, which these small ones are not
            for model in (was.model, now.model, *([own] if family == "llama" else []))
        ]
        assert all(torch.equal(answers[0], answer) for answer in answers[1:])


def test_float16_changes_logits_by_its_rounding_alone(make_tiny: Callable[[str], Any], tmp_path: Path) -> None:
    folder = folder_of(make_tiny, "llama", tmp_path / "model")
    exporting.write_gguf(folder, tmp_path / "half.gguf")
    was = cplus_models.load(str(folder), device="cpu").model
    now = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="half.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    for name, value in was.state_dict().items():
        stored = value.half().float() if value.dim() > 1 else value
        assert torch.equal(now.state_dict()[name], stored), name
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(now(ids).logits, was(ids).logits, rtol=2e-2, atol=2e-2)


def test_the_command_exports_a_jobs_model_and_replaces_nothing_unasked(
    make_tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    folder_of(make_tiny, "llama", tmp_path / "out" / "model")
    done = CliRunner().invoke(app, ["export", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    path = tmp_path / "out" / "model.gguf"
    assert record["path"] == str(path)
    assert record["bytes"] == path.stat().st_size
    reader = GGUFReader(path)
    assert len(reader.tensors) == record["tensors"]
    assert reader.get_field("tokenizer.ggml.pre").contents() == "smollm"  # type: ignore[union-attr]
    before = path.read_bytes()
    again = CliRunner().invoke(app, ["export", str(tmp_path / "out")])
    assert "exists already" in str(again.exception)
    assert path.read_bytes() == before


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    make_tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    out = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match=r"expected a model folder with a config\.json"):
        exporting.write_gguf(tmp_path, out)
    other = make_tiny("phi3")
    cplus_models.save(other.model, other.tokenizer, tmp_path / "phi3")
    with pytest.raises(ValueError, match=r"expected a model of llama, qwen2, qwen3, got phi3; llama\.cpp's"):
        exporting.write_gguf(tmp_path / "phi3", out)
    folder = folder_of(make_tiny, "llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    scaled = {**config, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    (folder / "config.json").write_text(json.dumps(scaled))
    with pytest.raises(ValueError, match="positions scaled by 'linear' cannot be exported"):
        exporting.write_gguf(folder, out)
    (folder / "config.json").write_text(json.dumps(config))
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="splits text by Digits and ByteLevel, unknown here"):
        exporting.write_gguf(folder, out)
    assert not out.exists()
    assert not list(tmp_path.glob(".model.gguf*"))


def test_an_export_reads_models_like_every_command(make_tiny: Callable[[str], Any], tmp_path: Path) -> None:

    def refused(name: str) -> str:
        done = CliRunner().invoke(app, ["export", str(tmp_path / name)], input="y\n")
        assert isinstance(done.exception, ValueError), done.output
        assert not (tmp_path / name / "model.gguf").exists()
        return str(done.exception)

    lacking = folder_of(make_tiny, "llama", tmp_path / "lacking") / "model.safetensors"
    weights = load_file(lacking)
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, lacking, metadata={"format": "pt"})
    assert "lacks 1 of its weights" in refused("lacking")

    pickled = folder_of(make_tiny, "llama", tmp_path / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    assert "no file named model.safetensors" in refused("pickled")

    hostile = folder_of(make_tiny, "llama", tmp_path / "hostile")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (hostile / "config.json").write_text(json.dumps(own))
    (hostile / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "contains custom code" in refused("hostile")
    assert not (tmp_path / "ran").exists()
