"""The toy world's tokenizer: one token per word with its leading blank, bytes for everything else."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cplus.toy.world import words

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
