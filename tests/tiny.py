"""A tiny causal LM with random weights, and rows of random tokens for it."""

from __future__ import annotations

import random

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cplus.core.rows import Encoded
from cplus.methods.table import Material, Past

VOCABULARY = 40


def lm(seed: int = 0, layers: int = 2) -> Qwen3ForCausalLM:
    """Layers of width 16, tied embeddings, in float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def rows(count: int, *, seed: int = 0, longest_target: int = 3) -> list[Encoded]:
    """Rows of uneven length."""
    draw = random.Random(seed)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, most)))

    return [Encoded(tokens(9), tokens(longest_target)) for _ in range(count)]


def material(new: int = 10, anchors: int = 4, probes: int = 6, synthetic: int = 5) -> Material:
    """New rows and one past task."""
    past = Past(
        name="past",
        anchors=rows(anchors, seed=1),
        probes=rows(probes, seed=2),
        synthetic=rows(synthetic, seed=3),
    )
    return Material(new=rows(new, seed=4), past=(past,))
