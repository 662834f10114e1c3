"""The tuned model of a repair: loaded, its adapters merged, and checked against the base."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from cplus import models
from cplus.adapters import merged_from
from cplus.data.examples import Example, to_row
from cplus.files import canonical_json
from cplus.job.repair.settings import RepairConfig
from cplus.job.rows import located
from cplus.models import Loaded
from cplus.models.loading import without_bars
from cplus.repairing.checks import Unrepairable
from cplus.repairing.weights import check_weights

_COMPUTES = ("model_type", "hidden_act", "num_attention_heads", "num_key_value_heads", "rope_theta", "rope_parameters")
"""Settings of an architecture that change what the same weights compute."""
_TEXTS = 64


def load_tuned(config: RepairConfig, base: Loaded, home: Path) -> Loaded:
    """The tuned model in float32; a folder of adapters is merged into a copy of the base."""
    place = Path(located(config.tuned, home)).expanduser()
    if (place / "adapter_config.json").is_file():
        return _merged(place, base)
    name = str(place) if place.exists() else config.tuned
    return models.load(name, device=config.device, trust_remote_code=config.trust_remote_code)


def _merged(place: Path, base: Loaded) -> Loaded:
    with without_bars():
        model: Any = merged_from(place, copy.deepcopy(base.model))
    tokenizer = base.tokenizer
    if (place / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    return replace(models.of(model.eval(), tokenizer), name=str(place), device=base.device)


def check_pair(base: Loaded, tuned: Loaded, texts: Sequence[Example]) -> None:
    """Refuse a tuned model that was not trained from the base: other weights, architecture or tokenizer, or none."""
    check_tokenizers(base, tuned, texts)
    check_weights(_shapes(base.model), _shapes(tuned.model))
    for name in _COMPUTES:
        was, now = (getattr(one.model.config.get_text_config(), name, None) for one in (base, tuned))
        if was != now:
            raise ValueError(
                f"base and tuned model are not of one architecture: {name} is {was!r} in the base and {now!r} in the "
                "tuned model; expected the model that the tuned one was trained from"
            )
    own = dict(base.model.named_parameters())
    if all(torch.equal(own[name], p) for name, p in tuned.model.named_parameters()):
        raise Unrepairable("base and tuned model have the same weights, so there is nothing to undo")


def check_tokenizers(base: Loaded, tuned: Loaded, texts: Sequence[Example]) -> None:
    """Refuse tokenizers whose tokens differ, in the vocabulary or on these rows."""
    was, now = base.tokenizer.get_vocab(), tuned.tokenizer.get_vocab()
    if was != now:
        changed = sum(now.get(token) != number for token, number in was.items()) + len(now.keys() - was.keys())
        raise ValueError(
            f"the vocabularies of base and tuned model differ in {changed:,} tokens ({len(was):,} and {len(now):,}); "
            "expected the model that the tuned one was trained from"
        )
    for example in texts[:_TEXTS]:
        text = canonical_json(to_row(example))
        if base.tokenizer.encode(text) != tuned.tokenizer.encode(text):
            raise ValueError(
                f"the tokenizers of base and tuned model split the row {example.id!r} into different tokens; expected "
                "the model that the tuned one was trained from"
            )


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}
