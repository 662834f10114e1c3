"""Repair by merging: base + a (tuned - base) with a share a for each block, found by forward passes alone.

Only one model is in memory; its weights are read piece by piece from the files of both, and written the same way.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import yaml
from safetensors import safe_open
from torch import Tensor, nn

from cplus.base import files
from cplus.base.terminal import track
from cplus.core.rows import Encoded
from cplus.jobs.progress import say
from cplus.methods.repair import Check, Levels, Repaired, Unrepairable, mean_loss
from cplus.models.names import ADAPTER
from cplus.training.measure import base_rows
from cplus.training.measure import divergence as kl

_LAYER = re.compile(r"(.*?\.\d+)\.")
_PIECE = 1 << 24
"""Weights that are read together; an embedding alone may be a sixth of a model."""
MERGE_ROWS = 64
"""Past rows that the divergence is measured on; it is measured dozens of times."""
_HALVINGS = 6
"""Evaluations of each way from the tuned towards the base model."""
_LEAST = 1e-3
"""The smallest part of the allowance that undoing a block is taken to cost."""
_SPELT = "expected the model that the tuned one was trained from"

Shares = Mapping[str, float]
"""How much of the change of each block is kept."""


class Blend:
    """A model in memory whose blocks lie between those of a base and a tuned model on disk."""

    def __init__(self, model: nn.Module, base: Path, tuned: Path) -> None:
        self._tuned, self._places = tuned, (_places(base), _places(tuned))
        self._own, self.shares = dict(model.named_parameters()), dict[str, float]()
        first, second = self._places
        if lone := sorted(first.keys() ^ second.keys()):
            raise ValueError(f"base and tuned model differ in {len(lone)} tensors, such as {lone[0]}; {_SPELT}")
        if lone := sorted(self._own.keys() - first.keys()):
            raise ValueError(f"{base}: expected its files to name the weights as the model does, but none is {lone[0]}")
        self.blocks: dict[str, list[str]] = {}
        for name in first:
            layer = _LAYER.match(name)
            self.blocks.setdefault(layer[1] if layer else name.removesuffix(".weight"), []).append(name)
        self.moved = {block: sum(map(self._moved, names)) for block, names in self.blocks.items()}
        if not any(self.moved.values()):
            raise Unrepairable("base and tuned model have the same weights, so there is nothing to undo")

    @torch.no_grad()
    def set(self, shares: Shares) -> None:
        """Keep this share of the change of each block; a block whose share stays is not read again."""
        for block, share in shares.items():
            for name in self.blocks[block] if self.shares.get(block) != share else ():
                own, start = self._own.get(name), 0
                for piece in self._between(name, share) if own is not None else ():
                    assert own is not None
                    own.view(-1)[start : start + piece.numel()].copy_(piece.reshape(-1))
                    start += piece.numel()
        self.shares = {**self.shares, **shares}

    def write(self, out: Path, base: str, tuned: str) -> None:
        """The tuned model's folder with these weights, in the precision it has, and the recipe for mergekit."""
        of = {name: block for block, names in self.blocks.items() for name in names}
        with files.replacing_folder(out) as part:
            for path in self._tuned.iterdir():
                if path.is_file() and path.suffix != ".safetensors":
                    shutil.copyfile(path, part / path.name)
            for path in sorted(set(self._places[1].values())):
                with path.open("rb") as source, (part / path.name).open("wb") as target:
                    length = source.read(8)
                    header = source.read(int.from_bytes(length, "little"))
                    target.write(length + header)
                    tensors = {name: own for name, own in json.loads(header).items() if name != "__metadata__"}
                    for name in sorted(tensors, key=lambda name: tensors[name]["data_offsets"][0]):
                        for piece in self._between(name, self.shares[of[name]]):
                            target.write(piece.contiguous().view(-1).view(torch.uint8).numpy().data)
            files.write_text(part / "mergekit.yml", recipe(base, tuned, self.shares))

    def _pieces(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The base and the tuned values; the files are closed after each piece, so that none of their pages stays."""
        start, rows = 0, 1
        while start < rows:
            read = []
            for place in self._places:
                with safe_open(place[name], framework="pt") as opened:
                    part = opened.get_slice(name)
                    shape = part.get_shape()
                    rows = shape[0] if shape else 1
                    step = max(1, _PIECE * rows // max(1, torch.Size(shape).numel()))
                    read.append((shape, part[start : start + step].clone() if shape else opened.get_tensor(name)))
            (was, before), (now, after) = read
            if was != now:
                raise ValueError(f"{name} is {was} in the base and {now} in the tuned model; {_SPELT}")
            yield before, after
            start += step

    def _moved(self, name: str) -> int:
        return sum(int((before.to(after) != after).sum()) for before, after in self._pieces(name))

    def _between(self, name: str, share: float) -> Iterator[Tensor]:
        for before, after in self._pieces(name):
            whole = share == 1.0 or not after.is_floating_point()
            yield after if whole else torch.lerp(before.float(), after.float(), share).to(after.dtype)


def _places(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a model's folder."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            found |= dict.fromkeys(opened.keys(), path)
    if not found or (folder / ADAPTER).is_file():
        raise ValueError(f"{folder}: expected a folder with a model's own weights in safetensors; leave out --by merge")
    return found


def merge(blend: Blend, model: nn.Module, checks: Sequence[Check], past: Sequence[Encoded], new_rows: int) -> Repaired:
    """Choose the shares and leave the model with them: the least divergence at which every check still holds.

    Each block is undone alone once, which tells its gain in divergence g and its cost c in the checks. If both are
    quadratic in what is undone, d = g / (g + m c) of each block is best for some m. This way from the tuned to the base
    model and the even one (WiSE-FT) are each followed as far as the checks allow, and the better end is taken.
    """
    most = dict.fromkeys(blend.blocks, 1.0)
    moved = [block for block, count in blend.moved.items() if count]

    def measured(shares: Shares) -> list[float]:
        blend.set({**most, **shares})
        return [check.measure(model) for check in checks]

    def past_loss() -> float:
        return mean_loss(model, past, what="repair: past loss")

    at_base, past_base = measured(dict.fromkeys(blend.blocks, 0.0)), past_loss()
    rows = base_rows(model, past)

    def divergence() -> float:
        return kl(model, rows)

    at_tuned, past_tuned, whole = measured({}), past_loss(), divergence()
    for check, before, after in zip(checks, at_base, at_tuned, strict=True):
        if not (check.held_out or after < before):
            raise Unrepairable(f"the tuned model has not learned the {check.name} rows, so there is nothing to keep")
    limits = [check.limit(b, t) for check, b, t in zip(checks, at_base, at_tuned, strict=True)]

    def cost(values: Sequence[float]) -> float:
        """The part of what may be given up that is used."""
        used = zip(values, at_tuned, limits, strict=True)
        return max((value - tuned) / max(limit - tuned, 1e-9) for value, tuned, limit in used)

    gains, costs = {}, {}
    for block in track(moved, "merge: each block undone alone"):
        values = measured({block: 0.0})
        gains[block], costs[block] = max(0.0, whole - divergence()), max(_LEAST, cost(values))
    scale = sum(gains.values()) / sum(costs.values())

    def weighed(way: float) -> dict[str, float]:
        much = {block: (1 / way - 1) * scale * costs[block] for block in moved}
        return {b: much[b] / (gains[b] + much[b]) if much[b] else 0.0 for b in moved}

    found: list[tuple[float, str, dict[str, float], list[float]]] = []
    for name, path in (("even", lambda way: dict.fromkeys(moved, 1 - way)), ("by block", weighed)):
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            way = (low + high) / 2
            values, left = measured(path(way)), divergence()
            held = cost(values) <= 1
            low, high = (way, high) if held else (low, way)
            found += [(left, name, path(way), values)] if held else []
            say(f"merge: {name} {way:.3f}, divergence {left:.4f} of {whole:.4f}: {'kept' if held else 'too much'}")
    left, name, shares, values = min(found, default=(whole, "", most, at_tuned), key=lambda one: one[0])
    if left >= whole:
        raise Unrepairable(
            "no part of the changes can be undone with the new rows still known: allow a larger tolerance"
        )
    blend.set({**most, **shares})
    levels = zip(checks, at_base, at_tuned, values, limits, strict=True)
    even = min((one[0] for one in found if one[1] == "even"), default=whole)
    return Repaired(
        undone=max(1, round(sum((1 - shares[block]) * blend.moved[block] for block in moved))),
        moved=sum(blend.moved.values()),
        parameters=sum(p.numel() for p in model.parameters()),
        new=tuple(
            Levels(name=c.name, unit=c.unit, base=b, tuned=t, repaired=v, limit=limit) for c, b, t, v, limit in levels
        ),
        past=Levels(name="past", unit="nats per token", base=past_base, tuned=past_tuned, repaired=past_loss()),
        past_rows=len(past),
        new_rows=new_rows,
        shares=tuple(blend.shares.values()),
        trials=2 + len(moved) + 2 * _HALVINGS,
        merged={
            "way": name,
            "blocks": dict(blend.shares),
            "divergence": {"tuned": whole, "repaired": left, "even": even},
        },
    )


def recipe(base: str, tuned: str, shares: Shares) -> str:
    """The same merge for mergekit: task arithmetic with a weight for each layer."""
    layers = {int(block.rpartition(".")[2]): share for block, share in shares.items() if block[-1].isdigit()}
    rest = [{"filter": block, "value": share} for block, share in shares.items() if not block[-1].isdigit()]
    slices = [
        {
            "sources": [
                {"model": base, "layer_range": [i, i + 1]},
                {"model": tuned, "layer_range": [i, i + 1], "parameters": {"weight": [*rest, {"value": layers[i]}]}},
            ]
        }
        for i in sorted(layers)
    ]
    whole = {"merge_method": "task_arithmetic", "base_model": base, "dtype": "float32", "slices": slices}
    return str(yaml.safe_dump(whole, sort_keys=False))
