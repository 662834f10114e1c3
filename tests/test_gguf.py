"""GGUF files: converted exactly, once, or not at all."""

from __future__ import annotations

import struct
import threading
from dataclasses import replace

import pytest
import torch
from packed import write_gguf
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GgufConfig, LlamaConfig, Qwen2Config, Qwen3Config

from cplus import models
from cplus.base import files
from cplus.data.examples import Choice
from cplus.data.interfaces import build
from cplus.models import loading


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_conversion_computes_the_same_and_happens_once_among_many(tiny_llama, tmp_path, cache, monkeypatch):
    path = write_gguf(tiny_llama, tmp_path / "m.gguf")
    done, convert = [], loading.convert
    monkeypatch.setattr(loading, "convert", lambda *given, **options: done.append(1) or convert(*given, **options))
    sha256 = files.sha256_file(path)
    (cache / "models" / f".gguf2-{sha256[:32]}.killed.part").mkdir(parents=True)
    threads = [threading.Thread(target=loading.converted, args=(sha256, lambda scratch: path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loaded = models.load(path)
    assert done == [1]
    assert [p.name for p in (cache / "models").iterdir() if p.is_dir()] == [f"gguf2-{sha256[:32]}"]
    ids = torch.tensor([[5, 60, 7, 80, 9]])
    assert torch.equal(loaded.model(ids).logits, tiny_llama.model(ids).logits)
    assert loaded.tokenizer.chat_template == tiny_llama.tokenizer.chat_template
    assert loaded.tokenizer.eos_token == "<|eot_id|>"
    assert not hasattr(loaded.model.config, "quantization_config")


ARRAY = struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 9)
"""The head of a file of one array."""


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[: int(0.3 * len(whole))],
        lambda whole: whole[: int(0.999 * len(whole))],
        # Few bytes that say a million elements, or arrays in arrays; gguf's own reader counts on past the end.
        lambda whole: ARRAY + struct.pack("<IQ", 0, 10**6),
        lambda whole: ARRAY + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 0, 10**6),
    ],
)
def test_a_damaged_file_is_refused_without_a_trace(tiny_llama, tmp_path, cache, damage):
    whole = write_gguf(tiny_llama, tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(damage(whole))
    with pytest.raises(ValueError, match=r"cut\.gguf: expected a complete GGUF file.*download it again"):
        models.load(tmp_path / "cut.gguf")
    assert [p.name for p in (cache / "models").iterdir()] == []


CONFIGS = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True, "head_dim": 128}),  # transformers reads no other from the file
    "gemma3": (Gemma3TextConfig, {"tie_word_embeddings": True, "head_dim": 8, "sliding_window": 32}),
}


@pytest.fixture
def packed_model(tiny_llama):
    """A random tiny model of an architecture, with the tiny Llama's tokenizer."""

    def made(name):
        kind, extra = CONFIGS[name]
        own = tiny_llama.model.config
        same = (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings",
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = kind(**{key: getattr(own, key) for key in same}, **extra)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
        return replace(tiny_llama, model=model)

    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_a_converted_model_is_what_transformers_reads(name, packed_model, tmp_path, cache):
    tiny = packed_model(name)
    path = write_gguf(tiny, tmp_path / "m.gguf", quantise="token_embd.weight")
    loaded = models.load(path).model.state_dict()
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    assert loaded.keys() == plain.keys()
    assert [key for key in loaded if not torch.equal(loaded[key], plain[key])] == []
    away = {key for key, value in tiny.model.state_dict().items() if not torch.allclose(loaded[key], value, atol=1e-6)}
    tied = {"lm_head.weight"} if tiny.model.config.tie_word_embeddings else set()
    assert away == {"model.embed_tokens.weight"} | tied  # the quantised one, which is not far off
    embedding = tiny.model.state_dict()["model.embed_tokens.weight"]
    assert torch.allclose(loaded["model.embed_tokens.weight"], embedding, atol=0.01)


def test_a_matrix_stored_twice_is_kept_from_the_head_and_a_lacking_one_is_refused(
    packed_model, tmp_path, cache, monkeypatch
):
    tiny = packed_model("qwen2")
    path = write_gguf(tiny, tmp_path / "m.gguf", quantise="token_embd.weight")
    monkeypatch.setattr(loading, "_TIED", {files.sha256_file(path)})
    model = models.load(path).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tiny.model.lm_head.weight)
    before = list((cache / "models").iterdir())
    del tiny.model.model.layers[1].mlp.up_proj
    with pytest.raises(ValueError, match=r"lacks 1 of its weights .*1\.mlp\.up_proj\.weight; .*Qwen2ForCausalLM"):
        models.load(write_gguf(tiny, tmp_path / "lacking.gguf"))
    assert list((cache / "models").iterdir()) == before


@pytest.mark.parametrize(("wanted", "pre", "first"), [(True, "smollm", ["ĊĊ", "1", "2"]), (False, "gpt-2", ["Ċ"])])
def test_bos_and_digits_are_as_the_file_wants_them(wanted, pre, first, tiny_llama, tmp_path, cache):
    tokenizer = models.load(write_gguf(tiny_llama, tmp_path / "m.gguf", pre, add_bos=wanted)).tokenizer
    begin = [tokenizer.bos_token_id] if wanted else []
    assert tokenizer("Where?").input_ids == begin + tokenizer("Where?", add_special_tokens=False).input_ids
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("\n\n12", add_special_tokens=False).input_ids)
    assert pieces[: len(first)] == first
    example = Choice(id="q", question="Where do fish live?", choices=("in water", "in air"), answer=0)
    assert list(build("cloze", tokenizer).prompt(example)).count(tokenizer.bos_token_id) == wanted
    assert list(build("letter", tokenizer).prompt(example)).count(tokenizer.bos_token_id) == 1  # the template's own


@pytest.mark.long
@pytest.mark.smollm
def test_smollm_is_what_it_says(smollm):
    tokenizer = smollm.tokenizer
    assert sum(p.numel() for p in smollm.model.parameters()) == 134_515_008
    assert smollm.window == 8192
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12").input_ids) == ["ĊĊ", "1", "2"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert tokenizer.decode(prompt["input_ids"][0]).endswith("<|im_end|>\n<|im_start|>assistant\n")
    answer = smollm.model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
