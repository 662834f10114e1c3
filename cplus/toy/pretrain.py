"""Build the toy models: `python -m cplus.toy.pretrain --size toy --out DIR`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from cplus.terminal import console, track
from cplus.toy import NAMES
from cplus.toy.vocabulary import build_tokenizer
from cplus.toy.world import DOMAINS, line, taught

LINES = 8
BATCH = 64
WEIGHT_DECAY = 0.01


@dataclass(frozen=True, kw_only=True)
class Size:
    """What differs between the toy models."""

    width: int
    layers: int
    hidden: int
    lr: float
    steps: int


SIZES = {
    "toy-s": Size(width=48, layers=4, hidden=144, lr=6e-3, steps=1500),
    "toy": Size(width=96, layers=4, hidden=288, lr=4e-3, steps=1000),
    "toy-l": Size(width=192, layers=5, hidden=576, lr=2e-3, steps=800),
}


def build_model(size: Size, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of that size."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=size.width // 4,
        max_position_embeddings=512,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def documents(tokenizer: PreTrainedTokenizerFast, generator: torch.Generator) -> Iterator[list[int]]:
    """Endless documents: eight lines of one domain, every taught fact once before any comes again."""
    encoded = [tokenizer([line(fact) for fact in taught(domain)])["input_ids"] for domain in DOMAINS]
    while True:
        orders = [torch.randperm(len(rows), generator=generator).tolist() for rows in encoded]
        starts = [(d, i) for d, order in enumerate(orders) for i in range(0, len(order), LINES)]
        for k in torch.randperm(len(starts), generator=generator).tolist():
            d, start = starts[k]
            yield [token for row in orders[d][start : start + LINES] for token in encoded[d][row]]


def batches(stream: Iterator[list[int]], pad: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Documents padded on the right, and the labels: -100 where there is padding."""
    while True:
        rows = [next(stream) for _ in range(BATCH)]
        ids = torch.full((BATCH, max(map(len, rows))), pad)
        labels = torch.full_like(ids, -100)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = labels[i, : len(row)] = torch.tensor(row)
        yield ids, labels


def train(model: nn.Module, source: Iterator[tuple[Tensor, Tensor]], size: Size) -> None:
    """Next-token training with AdamW on a one-cycle schedule."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.lr, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, size.lr, total_steps=size.steps, pct_start=0.1)
    for _ in track(range(size.steps), "pretraining", total=size.steps):
        ids, labels = next(source)
        # The padding lies to the right, where a causal model does not see it.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
