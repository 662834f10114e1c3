"""Which layer a parameter belongs to."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LAYER = re.compile(r"\blayers?\.(\d+)\.|\bh\.(\d+)\.|\bblocks\.(\d+)\.")
_DOWN = re.compile(r"\b(down_proj|c_proj|fc2|dense_4h_to_h)\b")


def layer_of(parameter: str) -> str:
    """The name of the layer that a parameter belongs to.

    >>> layer_of("model.layers.3.mlp.up_proj.weight"), layer_of("model.embed_tokens.weight")
    ('layer 3', 'embed_tokens')
    """
    if match := _LAYER.search(parameter):
        return f"layer {next(number for number in match.groups() if number)}"
    return parameter.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def middle_down_projection(names: Sequence[str]) -> int:
    """The index of the middle layer's MLP down-projection, or of the middle parameter if there is none.

    >>> middle_down_projection([f"layers.{i}.mlp.down_proj.weight" for i in range(5)])
    2
    """
    found = [i for i, name in enumerate(names) if _DOWN.search(name) and "attn" not in name and "weight" in name]
    return found[len(found) // 2] if found else len(names) // 2
