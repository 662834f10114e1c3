"""Tiny models of several kinds with random weights, each with its losses, for evidence of any loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its loss on a batch, and four batches each of past and new data."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    past: list[Any]
    new: list[Any]


def drawn(make: Callable[[], Any], count: int = 4) -> list[Any]:
    return [make() for _ in range(count)]


class Scaled(nn.Module):
    """A network whose BatchNorm keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.convolution(images))).mean((2, 3)))  # type: ignore[no-any-return]


def classifier() -> Case:
    """Images and their classes."""
    torch.manual_seed(0)
    model = Scaled()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    past = drawn(lambda: (torch.randn(5, 1, 6, 6), torch.randint(3, (5,))))
    return Case(model=model, loss=loss, past=past, new=drawn(lambda: (torch.randn(5, 1, 6, 6), torch.randint(3, (5,)))))


def regressor() -> Case:
    """Diffusion in miniature: predict the noise that was added, at a given noise level."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, noise, level = batch
        noised = (1 - level).sqrt() * x + level.sqrt() * noise
        return F.mse_loss(model(torch.cat([noised, level], 1)), noise)

    def make() -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(6, 4), torch.randn(6, 4), torch.rand(6, 1)

    return Case(model=model, loss=loss, past=drawn(make), new=drawn(make))


def forward_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a transformers model computes from its labels."""
    return model(**batch).loss  # type: ignore[no-any-return]


def encoder_decoder() -> Case:
    """A T5 of two layers."""
    torch.manual_seed(2)
    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )

    def make() -> dict[str, Tensor]:
        return {"input_ids": torch.randint(1, 32, (3, 6)), "labels": torch.randint(1, 32, (3, 4))}

    model = T5ForConditionalGeneration(config)
    return Case(model=model, loss=forward_loss, past=drawn(make), new=drawn(make))


def vision_language() -> Case:
    """A LLaVA: a CLIP encoder of images, a projection and a Llama."""
    torch.manual_seed(3)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    text = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=31))
    for name, p in model.named_parameters():  # the features come from the layer before the last
        if "post_layernorm" in name or "vision_tower.encoder.layers.1" in name or ".layers.1." in name:
            p.requires_grad_(False)

    def make() -> dict[str, Tensor]:
        ids = torch.cat([torch.full((2, 4), 31), torch.randint(1, 30, (2, 5))], 1)
        labels = ids.masked_fill(ids == 31, -100)
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8), "labels": labels}

    return Case(model=model, loss=forward_loss, past=drawn(make), new=drawn(make))


CASES: dict[str, Callable[[], Case]] = {
    "classifier": classifier,
    "regressor": regressor,
    "encoder-decoder": encoder_decoder,
    "vision-language": vision_language,
}
