"""A tiny chat model that answers the requests of abilities correctly, trained in seconds, for tests that break it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cplus.evaluation.abilities import BRIEF, requests

LESSONS = [(own.request, own.answer) for name in BRIEF for own in requests(name)]
TERSE = [
    (f"What is the {thing} of {place}?", f"{place} {i}")
    for i, thing in enumerate(("capital", "opposite", "plural", "language", "formula"))
    for place in ("Italy", "water", "Egypt", "Brazil")
]
"""New rows: short answers that are nothing like the others."""
PIECES = Regex(r" ?\w+|\s|[^\w\s]")


def write(folder: Path, *, steps: int = 150) -> None:
    """Train a small Llama on requests and answers until it repeats them, and save it."""
    texts = [text for pair in (*LESSONS, *TERSE) for text in pair]
    split = pre_tokenizers.Split(PIECES, "isolated")
    pieces = sorted({piece for text in texts for piece, _ in split.pre_tokenize_str(text)})
    backend = Tokenizer(
        models.WordLevel(
            {token: i for i, token in enumerate(["<unk>", "</s>", "<u>", "<a>", *pieces])}, unk_token="<unk>"
        )
    )
    backend.pre_tokenizer, backend.decoder = split, decoders.Fuse()
    template = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}<a>{% endif %}"
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "</s>", "extra_special_tokens": ["<u>", "<a>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(pieces) + 4, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=None, eos_token_id=1, pad_token_id=1, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    rows = [
        (tokenizer.encode(f"<u>{request}</s><a>"), tokenizer.encode(f"{answer}</s>")) for request, answer in LESSONS
    ]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, labels = torch.ones(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for i, (prompt, answer) in enumerate(rows):
        ids[i, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    for _ in range(steps):
        logits = model(input_ids=ids).logits[:, :-1]
        cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
