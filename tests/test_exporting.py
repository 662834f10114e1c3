"""GGUF files: what is exported loads again with the same weights, tokens and answers, and the rest is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from cplus import models as cplus_models
from cplus.cli.app import app
from cplus.models import exporting, loading

PROMPTS = ["Say 12 words.", "Three  spaces   here", "line\n\n1 next", "é ü 漢字", "tabs\tand 007", "?!", "x=1;"]
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(make_tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Tiny models with a byte-level BPE tokenizer of their own, each saved once; do not write to them."""
    root = tmp_path_factory.mktemp("models")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate(["<|end|>", *alphabet, "th", "ab"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", bos_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"

    def saved(family: str) -> Path:
        if not (root / family).exists():
            model = make_tiny(family).model
            model.resize_token_embeddings(len(vocabulary) + 3)  # rows beyond the tokenizer's, as real models have
            cplus_models.save(model, tokenizer, root / family)
        return root / family

    return saved


def read_back(path: Path) -> Any:
    """By transformers itself."""
    whole = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=whole
    ).eval()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_exported_model_comes_back_with_the_same_weights_tokens_and_answers(
    folders: Folders, family: str, tmp_path: Path
) -> None:
    found = exporting.write_gguf(folders(family), tmp_path / "model.gguf", "float32")
    assert (found["architecture"], found["splits_text_as"]) == (family, "smollm")
    was = cplus_models.load(folders(family), device="cpu")
    own = read_back(tmp_path / "model.gguf")
    for name, value in was.model.state_dict().items():
        assert torch.equal(own.state_dict()[name], value), name
    # and our own reader, tokenizer included
    (tmp_path / "back").mkdir()
    loading.convert(tmp_path / "model.gguf", tmp_path / "back")
    now = cplus_models.load(tmp_path / "back", device="cpu")
    assert now.tokenizer.chat_template == was.tokenizer.chat_template
    for prompt in PROMPTS:
        ids = was.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert now.tokenizer(prompt, add_special_tokens=False)["input_ids"] == ids
        # transformers takes heads of 128 for every Qwen3 file, which these small ones are not
        every = (was.model, now.model, *([own] if family == "llama" else []))
        with torch.no_grad():
            logits = [model(torch.tensor([ids])).logits for model in every]
        assert all(torch.equal(logits[0], other) for other in logits[1:])


def test_float16_changes_logits_by_its_rounding_alone(folders: Folders, tmp_path: Path) -> None:
    exporting.write_gguf(folders("llama"), tmp_path / "half.gguf")
    was, now = cplus_models.load(folders("llama"), device="cpu").model, read_back(tmp_path / "half.gguf")
    for name, value in was.state_dict().items():
        stored = value.half().float() if value.dim() > 1 else value
        assert torch.equal(now.state_dict()[name], stored), name
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(now(ids).logits, was(ids).logits, rtol=2e-2, atol=2e-2)


def test_the_command_exports_a_jobs_model_and_replaces_nothing_unasked(folders: Folders, tmp_path: Path) -> None:
    out, path = tmp_path / "out", tmp_path / "out" / "model.gguf"
    shutil.copytree(folders("llama"), out / "model")
    done = CliRunner().invoke(app, ["export", str(out), "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert (record["path"], record["bytes"]) == (str(path), path.stat().st_size)
    reader = GGUFReader(path)
    assert len(reader.tensors) == record["tensors"]
    assert reader.get_field("tokenizer.ggml.pre").contents() == "smollm"  # type: ignore[union-attr]
    before = path.read_bytes()
    again = CliRunner().invoke(app, ["export", str(out)])
    assert "exists already" in str(again.exception)
    assert path.read_bytes() == before


def _scaled(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))


def _split_otherwise(folder: Path) -> None:
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False
    (folder / "tokenizer.json").write_text(json.dumps(whole))


def _hostile(folder: Path) -> None:
    own = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(own))
    (folder / "code.py").write_text(f"open({str(folder.parent / 'ran')!r}, 'w')\n")


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", shutil.rmtree, "expected a model folder with a config.json"),
        ("phi3", lambda folder: None, "expected a model of llama, qwen2, qwen3, got phi3; llama.cpp's"),
        ("llama", _scaled, "positions scaled by 'linear' cannot be exported"),
        ("llama", _split_otherwise, "splits text by Digits and ByteLevel, unknown here"),
        ("llama", _hostile, "contains custom code"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    folders: Folders, family: str, change: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    change(Path(shutil.copytree(folders(family), tmp_path / "model")))
    with pytest.raises(ValueError, match=message):
        exporting.write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert not {"model.gguf", "ran"} & {path.name for path in tmp_path.iterdir()}
    assert not list(tmp_path.glob(".model.gguf*"))
