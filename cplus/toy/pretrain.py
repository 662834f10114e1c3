"""Build the toy models: `python -m cplus.toy.pretrain toy DIR`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from cplus.base.files import replacing_folder
from cplus.base.terminal import console, track
from cplus.core.losses import last_logits, left_padded
from cplus.core.rows import length_sorted_batches
from cplus.data.examples import Choice
from cplus.toy.world import DOMAINS, line, prompt, taught, words

END = "<|endoftext|>"
MARKS = ("Question:", "Answer:", "?", "\n", "\n\n")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A lossless tokenizer for any text, in which each word of the world is exactly one token."""
    pieces = [END, *(f"<0x{byte:02X}>" for byte in range(256)), *MARKS, *(f" {word}" for word in words())]
    # Unigram with byte fallback instead of WordLevel, so that text from outside the world round-trips.
    unigram = models.Unigram([(piece, 0.0) for piece in pieces], unk_id=0, byte_fallback=True)
    tokenizer = Tokenizer(unigram)
    split = Regex(r"Question:|Answer:|\n\n|\n| ?[^\s?]+|\?|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(split, behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


LINES = 8
BATCH = 64
ANSWER_WEIGHT = 10.0  # most of a line is a random name, which cannot be predicted


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
    "toy": Size(width=96, layers=4, hidden=288, lr=4e-3, steps=800),
    "toy-l": Size(width=192, layers=5, hidden=576, lr=2e-3, steps=500),
}


def documents(tokenizer: PreTrainedTokenizerFast, generator: torch.Generator) -> Iterator[list[int]]:
    """Endless documents of eight lines from one domain; every taught fact appears once before any is repeated."""
    encoded = [tokenizer([line(fact) for fact in taught(domain)])["input_ids"] for domain in DOMAINS]
    while True:
        orders = [torch.randperm(len(rows), generator=generator).tolist() for rows in encoded]
        starts = [(d, i) for d, order in enumerate(orders) for i in range(0, len(order), LINES)]
        for k in torch.randperm(len(starts), generator=generator).tolist():
            d, start = starts[k]
            yield [token for row in orders[d][start : start + LINES] for token in encoded[d][row]]


def train(model: nn.Module, tokenizer: PreTrainedTokenizerFast, size: Size, generator: torch.Generator) -> None:
    """AdamW on a one-cycle schedule over the taught facts; a token after `Answer:` counts ANSWER_WEIGHT times."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, size.lr, total_steps=size.steps, pct_start=0.1)
    source, answer_mark = documents(tokenizer, generator), tokenizer.convert_tokens_to_ids("Answer:")
    model.train()
    for _ in track(range(size.steps), "pre-training", total=size.steps):
        rows = [torch.tensor(next(source)) for _ in range(BATCH)]
        ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        targets = pad_sequence(rows, batch_first=True, padding_value=-100)[:, 1:]
        # The padding is on the right, where a causal model does not see it, so no attention mask is needed.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
        weights = torch.where(ids[:, :-1] == answer_mark, ANSWER_WEIGHT, 1.0) * (targets != -100)
        loss = (losses.view_as(targets) * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def recall(model: nn.Module, tokenizer: PreTrainedTokenizerFast, facts: Sequence[Choice]) -> float:
    """The share of facts whose correct value is the model's most likely token."""
    rows = tokenizer([prompt(fact.question) for fact in facts])["input_ids"]
    values = torch.tensor([tokenizer.convert_tokens_to_ids(f" {fact.right}") for fact in facts])
    right = 0
    for chosen in length_sorted_batches([len(row) for row in rows], max_tokens=8192, max_rows=512):
        batch = left_padded([rows[i] for i in chosen], torch.device("cpu"))
        right += int((last_logits(model, batch, 1)[:, 0].argmax(-1) == values[chosen]).sum())
    return right / len(facts)


def pretrain(size: str, out: Path, seed: int = 0) -> None:
    """Train a toy model of a size, write its folder, and print the recall of each domain's taught facts."""
    if size not in SIZES:
        raise ValueError(f"expected a toy size ({', '.join(SIZES)}), got {size!r}")
    tokenizer, own = build_tokenizer(), SIZES[size]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=own.width,
        intermediate_size=own.hidden,
        num_hidden_layers=own.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=own.width // 4,
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
        model = Qwen3ForCausalLM(config)
    train(model, tokenizer, own, torch.Generator().manual_seed(seed))
    model.half()  # half the size to ship; loaded as float32 masters
    with replacing_folder(out) as part:
        tokenizer.save_pretrained(part)
        model.save_pretrained(part)
    model.float().eval()
    for domain in DOMAINS:
        console.print(f"{domain}: {recall(model, tokenizer, taught(domain)):.1%} of the taught facts")


if __name__ == "__main__":
    typer.run(pretrain)
