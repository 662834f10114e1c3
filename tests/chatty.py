"""A tiny chat model that can write: probes by letter, requests from nothing, and answers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def write(folder: Path) -> None:
    """A chat model that writes questions with options, requests and answers: word pairs, disturbed by two layers."""
    topics = [" birds", " rivers", " music", " trains", " bread", " maps"]
    chain = [  # every word has one place, so that pairs are enough to keep the form
        ["<a>"], ["Question:"], [" Which"], [" bird", " fish", " stone", " tree"], [" is", " was", " seems"],
        [" old", " rare", " tall", " small"], ["?"], ["\nOptions:"], ["\nA:"], [" red", " blue"],
        ["\nB:"], [" north", " south"], ["\nC:"], [" one", " two"], ["\nD:"], [" iron", " gold"], ["</s>"], ["</s>"],
    ]  # fmt: skip
    pairs = [*pairwise(chain), (["<u>", "Request:", "<unk>", " about", " and"], topics)]
    pairs += [(topics, [" about", " and", "."]), (["."], ["\n\n---", "</s>"]), (["\n\n---"], ["</s>"])]
    words = dict.fromkeys([*"ABCD", *(word for pair in pairs for side in pair for word in side)])
    ids = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n[A-D]:|\n\n---|\n?\w+:| ?\w+|\W"), "isolated")
    backend.decoder = decoders.Fuse()
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "</s>", "extra_special_tokens": ["<u>", "<a>"]}
    template = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}<a>{% endif %}"
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special).save_pretrained(folder)
    width = -len(ids) % 8 + len(ids)
    config = LlamaConfig(
        vocab_size=len(ids), hidden_size=width, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=ids["</s>"], pad_token_id=ids["</s>"],
    )  # fmt: skip
    model, draw = LlamaForCausalLM(config), np.random.RandomState(0)
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.dim() > 1):
            parameter.copy_(torch.from_numpy(draw.standard_normal(tuple(parameter.shape)) * 0.05))
        model.get_input_embeddings().weight.copy_(torch.eye(len(ids), width))
        for before, after in pairs:
            for word in before:
                model.lm_head.weight[[ids[each] for each in after], ids[word]] = 12 * width**-0.5
    model.save_pretrained(folder)
