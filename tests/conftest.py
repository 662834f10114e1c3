"""Small things the tests share: tiny models of four real architectures, the benchmark data, SmolLM2."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from toyjob import write_files
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from cplus.core import kernels

CORPUS = [
    "Question: What colour is the sky on a clear day?\nOptions:\nA: blue\nB: green\nC: red\nD: black\n\n",
    "Please reply with only A, B, C, or D. Do not provide any explanation.",
    "Please answer strictly with A, B, C, or D only. No explanation.",
    "Question: Which animal barks at the moon?\nAnswer: a dog\n\nQuestion: Where do fish live?\nAnswer: in water\n\n",
    "You are a helpful assistant. system user assistant model think E: 0 1 2 3 4 5 6 7 8 9",
]

# The shape of each family's own template: ChatML with a thinking switch; turns without a system role; tagged turns;
# headers behind a BOS token that tokenising again would double.
QWEN3_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
GEMMA2_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI3_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    config: type[Any]
    extra: dict[str, Any]
    template: str
    specials: tuple[str, ...]  # the first opens a text, the second ends a turn


FAMILIES = {
    "qwen3": Family(
        config=Qwen3Config,
        extra={"head_dim": 8, "tie_word_embeddings": True},
        template=QWEN3_TEMPLATE,
        specials=("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>"),
    ),
    "gemma2": Family(
        config=Gemma2Config,
        extra={"head_dim": 8, "sliding_window": 32, "query_pre_attn_scalar": 8, "attn_implementation": "eager"},
        template=GEMMA2_TEMPLATE,
        specials=("<bos>", "<end_of_turn>", "<start_of_turn>"),
    ),
    "phi3": Family(
        config=Phi3Config,
        extra={"sliding_window": None},
        template=PHI3_TEMPLATE,
        specials=("<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"),
    ),
    "llama": Family(
        config=LlamaConfig,
        extra={"tie_word_embeddings": False},
        template=LLAMA_TEMPLATE,
        specials=("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A random model of a real architecture, small enough for any test, and its tokenizer."""

    family: str
    model: Any
    tokenizer: Any


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=list(family.specials), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    opening, end_of_turn = family.specials[:2]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=opening,
        eos_token=end_of_turn,
        pad_token=end_of_turn,
        chat_template=family.template,
    )


@lru_cache(maxsize=8)
def _tiny(name: str) -> Tiny:
    family = FAMILIES[name]
    tokenizer = _tokenizer(family)
    config = family.config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **family.extra,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():  # the default spread of 0.02 makes all predictions nearly equal
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return Tiny(family=name, model=model, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def make_tiny() -> Callable[[str], Tiny]:
    """A fresh copy of the tiny model of a family, free to be trained."""
    return lambda name: deepcopy(_tiny(name))


@pytest.fixture(params=list(FAMILIES))
def tiny(request: pytest.FixtureRequest, make_tiny: Callable[[str], Tiny]) -> Tiny:
    """Each of the four families in turn."""
    return make_tiny(request.param)


@pytest.fixture
def tiny_llama(make_tiny: Callable[[str], Tiny]) -> Tiny:
    """One tiny model, where the architecture does not matter."""
    return make_tiny("llama")


@pytest.fixture(params=[True, False], ids=["avx512bf16", "without"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both paths of bitsandbytes on every processor: a layer asks once, when it is made."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: request.param)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for the module: tiny tensors gain nothing from two, and the bits do not depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache of banks and answers for the module."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("CPLUS_CACHE", str(folder))
        yield folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the rows of a small job."""
    write_files(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def smoke_results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """All studies' results at smoke scale and their cache; test processes share the runs out among them."""
    from cplus.lab import SCALES, STUDIES, runs_of
    from cplus.lab.runner import finished, in_this_process, perform

    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out, cache = base / "smoke-results", base / "smoke-cache"
    specs = list(dict.fromkeys(spec for study in STUDIES.values() for spec in runs_of(study, SCALES["smoke"])))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPLUS_CACHE", str(cache))
        assert [ended.failed for ended in perform(specs, out / "smoke", in_this_process) if ended.failed] == []
    torch.set_num_threads(threads)
    assert len(finished(specs, out / "smoke")) == len(specs)
    return out, cache


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of benchmark data, or a skip that says how to give one."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("CPLUS_DATA") or beside)
    if not (folder / "csqa.jsonl").is_file():
        pytest.skip("no benchmark data: set CPLUS_DATA to the folder that holds csqa.jsonl")
    return folder


@pytest.fixture(scope="session")
def smollm() -> Any:
    """SmolLM2-135M-Instruct, cached or fetched; shared by all tests, so do not train it."""
    from cplus.models import load

    try:
        return load("smollm2-135m")
    except ConnectionError as error:
        pytest.skip(f"smollm2-135m is not cached and cannot be fetched: {error}")


@pytest.fixture(scope="session")
def packaged_folder() -> Callable[[str], Path]:
    """The converted folder of a packaged model that is in the cache, or a skip: fetching one takes minutes."""
    from cplus.models.loading import place
    from cplus.models.names import PACKAGED

    def found(alias: str) -> Path:
        folder = place(PACKAGED[alias].sha256)
        if not folder.exists():
            pytest.skip(f"{alias} is not in the cache; 'cplus evaluate {alias} --task csqa --limit 1' fetches it")
        return folder

    return found


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled gate, however small the model."""
    if not kernels.can_compile("cpu"):
        pytest.skip("no C++ compiler on this machine")
    monkeypatch.setattr(kernels, "WORTH_COMPILING", 0)
