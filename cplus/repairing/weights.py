"""The weights of a base and a tuned model: checked to match, and written into one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from cplus.repairing.checks import Unrepairable


class Weights:
    """The parameters that differ between base and tuned model, with both values."""

    def __init__(self, model: nn.Module, base: Mapping[str, Tensor]) -> None:
        own = dict(model.named_parameters())
        check_weights({name: tuple(p.shape) for name, p in base.items()}, {n: tuple(p.shape) for n, p in own.items()})
        moved = [name for name, p in own.items() if not torch.equal(base[name].to(p), p)]
        if not moved:
            raise Unrepairable("base and tuned model have the same weights, so there is nothing to undo")
        self.parameters = sum(p.numel() for p in own.values())
        self.moved = sum(int((base[name].to(own[name]) != own[name]).sum()) for name in moved)
        self.params = [own[name] for name in moved]
        self.base = [base[name].detach() for name in moved]
        self.tuned = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def between(self, part: float) -> None:
        """The weights part of the way from base to tuned."""
        for p, before, after in zip(self.params, self.base, self.tuned, strict=True):
            p.copy_(torch.lerp(before.to(after), after, part))

    def deltas(self) -> Iterator[Tensor]:
        """What training changed, one tensor at a time."""
        return (after - before.to(after) for before, after in zip(self.base, self.tuned, strict=True))

    def base_values(self) -> None:
        """The base's weights, exactly."""
        self._write(self.base)

    def tuned_values(self) -> None:
        """The tuned weights, exactly."""
        self._write(self.tuned)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for p, value in zip(self.params, values, strict=True):
            p.copy_(value)


def check_weights(base: Mapping[str, tuple[int, ...]], tuned: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights whose names or shapes differ."""
    if lone := sorted(base.keys() ^ tuned.keys()):
        whose = "base" if lone[0] in base else "tuned"
        raise ValueError(
            f"base and tuned model differ in {len(lone)} weights: only the {whose} model has {lone[0]}; expected the "
            "model that the tuned one was trained from"
        )
    if different := [name for name in base if base[name] != tuned[name]]:
        name = different[0]
        raise ValueError(
            f"base and tuned model differ in the shape of {len(different)} weights: {name} is {list(base[name])} in "
            f"the base and {list(tuned[name])} in the tuned model; expected the model that the tuned one was trained "
            "from"
        )
