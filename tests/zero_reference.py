"""Gated steps in one process with the arithmetic of two under ZeRO: halves of a batch, their sum, flat partitions.

An update within rounding of 0 decides its mask by the last bit, so only the same sums in the same order give the same
masks. Each rank notes how its partitions lie (`recipe`); the reference knows nothing else of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from cplus.core.evidence import Reference
from cplus.core.gates import Collaborative, Proposal
from cplus.core.guard import Guard
from cplus.core.losses import shared_losses
from cplus.core.passes import turns
from cplus.core.rows import MAX_TOKENS, Encoded, like_length
from cplus.core.shards import Layout

Loss = Callable[[nn.Module], Tensor]
Masks = dict[str, dict[int, Tensor]]
"""By the name of a parameter and the first of the coordinates: the masks of all steps."""


def recipe(guard: Guard) -> dict[str, Any]:
    """What this rank's partitions hold, and the norm before clipping of every step from now on."""
    norms: list[Tensor] = []  # in float32 at stages 1 and 2, in float64 at stage 3

    def see(position: int, _: Proposal, __: Tensor) -> None:
        if position == 0:
            norms.append(guard.zero.engine.optimizer._global_grad_norm.detach().clone())

    guard.observers.append(see)
    held = [(f.name, f.start, f.partition, f.offset, f.size) for f in guard.zero.fragments]
    return {"fragments": held, "sizes": [p.numel() for p in guard.params], "norms": norms}


class TwoRanks:
    """The partitions of two ranks as plain parameters, stepped by one plain AdamW under one guard."""

    def __init__(self, model: nn.Module, recipes: Sequence[dict[str, Any]], decay: Callable[[Tensor], float]) -> None:
        self.model, self.recipes = model, recipes
        self.params = dict(model.named_parameters())
        self.flat = [[nn.Parameter(torch.zeros(size)) for size in recipe["sizes"]] for recipe in recipes]
        for name, p in self.params.items():
            self.scatter({name: p.detach()}, lambda flat: flat.data)
        names = [{i: name for name, _, i, *_ in recipe["fragments"]} for recipe in recipes]
        self.groups = [
            {"params": [p], "weight_decay": decay(self.params[names[rank][i]])}
            for rank, own in enumerate(self.flat)
            for i, p in enumerate(own)
            if i in names[rank]
        ]

    def scatter(self, values: dict[str, Tensor], place: Callable[[nn.Parameter], Tensor]) -> None:
        """Write whole tensors into the partitions, or what `place` returns for them."""
        for own, recipe in zip(self.flat, self.recipes, strict=True):
            for name, start, i, offset, size in recipe["fragments"]:
                if name in values:
                    place(own[i])[offset : offset + size] = values[name].flatten()[start : start + size]

    @torch.no_grad()
    def gather(self) -> None:
        """Write the partitions back into the model."""
        for own, recipe in zip(self.flat, self.recipes, strict=True):
            for name, start, i, offset, size in recipe["fragments"]:
                self.params[name].view(-1)[start : start + size] = own[i][offset : offset + size]

    def gradient(self, loss: Loss) -> dict[str, Tensor]:
        found = torch.autograd.grad(loss(self.model), list(self.params.values()))
        return dict(zip(self.params, found, strict=True))


class Same(torch.autograd.Function):
    """The identity, as a step of its own in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def bounded(model: nn.Module) -> nn.Module:
    """ZeRO 3 hooks every module's inputs, so the gradients of a tensor's uses inside a module are added up first.

    A norm reads its input twice and the residual once more: (a + b) + residual instead of (residual + a) + b.
    """

    def pass_on(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(Same.apply(x) if isinstance(x, Tensor) and x.requires_grad else x for x in inputs)

    for module in model.modules():
        module.register_forward_pre_hook(pass_on)
    return model


def added(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: a[name] + b[name] for name in a}


def past(anchors: Sequence[Encoded], probes: Sequence[Encoded], weight: float) -> list[Loss]:
    """Each rank's share of the blended loss, whose gradients are summed."""
    shares = (weight / len(anchors), (1.0 - weight) / len(probes))
    seen = [(i, row) for i, rows in enumerate((anchors, probes)) for row in rows]

    def of(rank: int) -> Loss:
        batches = list(like_length([row for _, row in seen], MAX_TOKENS, 2))
        (turn,) = turns(batches, Layout(rank=rank, world=2, sharded=True))
        batch = [seen[item] for item in turn.items]

        def loss(model: nn.Module) -> Tensor:
            losses = shared_losses(model, [row for _, row in batch])
            return (losses * losses.new_tensor([shares[i] for i, _ in batch])).sum()

        return loss

    return [of(rank) for rank in range(2)]


def follow(
    stage: int,
    ranks: TwoRanks,
    updates: Sequence[Sequence[Sequence[Loss]]],
    evidence: Sequence[Loss],
    *,
    epoch: int,
    lr: float,
    clip: float,
) -> tuple[list[Tensor], Masks]:
    """One update for each list of micro-batches, each a loss per rank; the sum of all losses is the update's."""
    optimizer = AdamW(ranks.groups, lr=lr)

    def blended(params: Sequence[nn.Parameter], _: int) -> Reference:
        ranks.model.eval()
        first, second = (ranks.gradient(loss) for loss in evidence)
        ranks.model.train()
        held = {id(p): torch.zeros_like(p) for own in ranks.flat for p in own}
        ranks.scatter(added(first, second), lambda p: held[id(p)])
        return Reference(vectors=[[held[id(p)] for p in params]])

    holder = nn.ParameterList([p for own in ranks.flat for p in own])
    guard = Guard(optimizer, holder, evidence=blended, gate=Collaborative(beta=0.9))
    masks = _watched(guard, ranks)
    for number, micro_batches in enumerate(updates):
        if number % epoch == 0:
            guard.refresh()
        parts = [[ranks.gradient(loss) for loss in losses] for losses in micro_batches]
        if stage == 1:  # each rank adds up its own micro-batches and only then are the ranks summed
            parts = [list(own) for own in zip(*parts, strict=True)]
        whole = added(*(added(*pair) for pair in parts)) if len(parts) == 2 else added(*parts[0])
        norm = ranks.recipes[0]["norms"][number]
        own_norm = torch.stack([g.double().square().sum() for g in whole.values()]).sum().sqrt()
        torch.testing.assert_close(norm.double(), own_norm, rtol=1e-6, atol=0.0)
        scale = 1.0 / torch.clamp((norm + 1e-6) / clip, min=1.0)
        for p in guard.params:
            p.grad = torch.zeros_like(p)
        ranks.scatter({name: g * scale for name, g in whole.items()}, lambda p: p.grad)  # type: ignore[arg-type]
        optimizer.step()
        ranks.gather()
    return [p.detach() for p in ranks.model.parameters()], masks()


def _watched(guard: Guard, ranks: TwoRanks) -> Callable[[], Masks]:
    places = {id(p): (rank, i) for rank, own in enumerate(ranks.flat) for i, p in enumerate(own)}
    seen: dict[tuple[str, int], list[Tensor]] = {}

    def see(position: int, proposal: Proposal, _: Tensor) -> None:
        mask = proposal.sign.sign() * proposal.delta.sign() <= 0
        rank, at = places[id(guard.params[position])]
        for name, start, i, offset, size in ranks.recipes[rank]["fragments"]:
            if i == at:
                seen.setdefault((name, start), []).append(mask[offset : offset + size].clone())

    def collected() -> Masks:
        parts: dict[str, list[Tensor]] = {}
        for name, first in sorted(seen):
            parts.setdefault(name, []).append(torch.stack(seen[name, first]))
        return {name: {0: torch.cat(held, 1)} for name, held in parts.items()}

    guard.observers.append(see)
    return collected
