"""The measured quantities as sums over one tensor's coordinates, to be added over tensors, layers, steps and epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from cplus.algorithm import collaborates

Sums: TypeAlias = dict[str, float]
BLOCK = 1 << 20  # coordinates processed at a time, so that double precision needs only a few megabytes


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Corresponding parts of tensors of equal shape, flat and in double precision."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), BLOCK):
        yield tuple(part[start : start + BLOCK].double() for part in flat)


def masked(theta: Tensor, proposed: Tensor, g_hat: Tensor) -> Sums:
    """How much of a proposal the binary mask admits, in coordinates and in energy (squared size).

    Paper: App. E.7.    sum m,    sum m delta^2
    """
    found = []
    for t, p, g in blocks(theta, proposed, g_hat):
        delta = p - t
        mask, energy = collaborates(g, delta).double(), delta.square()
        found.append([mask.sum(), (mask * energy).sum(), energy.sum()])
    return {"coordinates": float(theta.numel()), **_added(("mask", "mask_energy", "energy"), found)}


def applied(theta: Tensor, proposed: Tensor, c: Tensor) -> Sums:
    """How much of a proposal the coefficient admits: sum c, and the energy of c * delta."""
    found = []
    for t, p, k in blocks(theta, proposed, c):
        found.append([k.sum(), (k * (p - t)).square().sum()])
    return _added(("coefficient", "coefficient_energy"), found)


def masses(theta: Tensor, proposed: Tensor, g_hat: Tensor, c: Tensor, g_past: Tensor) -> Sums:
    """Harmful mass admitted and safe mass removed, judged by the gradient of all past rows.

    Paper: App. B.    z = g_past * delta;    sum m [z]+,    sum (1 - m) [-z]+,    and the same with c for m
    """
    found = []
    for t, p, g, k, past in blocks(theta, proposed, g_hat, c, g_past):
        delta = p - t
        mask, z = collaborates(g, delta).double(), past * delta
        harm, safe = z.clamp(min=0.0), (-z).clamp(min=0.0)
        removed = [((1.0 - m) * safe).sum() for m in (mask, k)]
        found.append([harm.sum(), safe.sum(), (mask * harm).sum(), removed[0], (k * harm).sum(), removed[1]])
    names = ("harmful", "safe", "mask_harmful", "mask_removed", "coefficient_harmful", "coefficient_removed")
    return _added(names, found)


def apart(theta: Tensor, proposed: Tensor, g_hat: Tensor, reference: Tensor) -> float:
    """The update energy on which two binary masks differ; divided by the whole energy, it is 1 minus the agreement.

    Paper: App. E.11.    sum delta^2 |m - m_reference|
    """
    found = []
    for t, p, g, r in blocks(theta, proposed, g_hat, reference):
        delta = p - t
        found.append([(delta.square() * (collaborates(g, delta) - collaborates(r, delta)).abs().double()).sum()])
    return _added(("apart",), found)["apart"]


def first_order(theta: Tensor, proposed: Tensor, g_hat: Tensor, gradient: Tensor) -> Sums:
    """The first-order change of a loss under the whole proposal and under the part that the binary mask admits.

    Paper: App. B.    g . delta,    g . (m delta)
    """
    found = []
    for t, p, g, past in blocks(theta, proposed, g_hat, gradient):
        delta = p - t
        z = past * delta
        found.append([z.sum(), (z * collaborates(g, delta)).sum()])
    return _added(("change", "gated_change"), found)


def share(part: float, whole: float) -> float | None:
    """A share, or None if the whole is 0.

    >>> share(1.0, 4.0), share(0.0, 0.0)
    (0.25, None)
    """
    return part / whole if whole else None


def _added(names: tuple[str, ...], found: list[list[Tensor]]) -> Sums:
    total = torch.stack([torch.stack(row) for row in found]).sum(0)
    return dict(zip(names, total.tolist(), strict=True))
