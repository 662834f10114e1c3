"""The curvature gate: its coefficients against a float64 oracle, and every way to apply them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import oracle
import pytest
import tiny
import torch
from quadratic import copies, same
from torch import nn

from cplus.core import kernels
from cplus.core.evidence import Reference, Source
from cplus.core.gates import Elementwise, stored
from cplus.core.guard import Guard
from cplus.core.losses import answer_losses
from cplus.core.optim import AdamW
from cplus.methods.curvature import Curvature, attenuation, damping

SOURCES = (
    Source(name="anchors", weight=0.25, rows=tiny.rows(3, seed=1)),
    Source(name="probes", weight=0.75, rows=tiny.rows(5, seed=2)),
)


def squared_gradients(model: nn.Module) -> list[oracle.Array]:
    """Per source and row, one backward pass each, in float64."""
    model = copy.deepcopy(model).double()
    total = [np.zeros(tuple(p.shape)) for p in model.parameters()]
    for source in SOURCES:
        for row in source.rows:
            model.zero_grad()
            answer_losses(model, [row]).sum().backward()
            for square, p in zip(total, model.parameters(), strict=True):
                square += source.weight / len(source.rows) * p.grad.numpy() ** 2
    return total


def test_the_coefficients_equal_the_oracles() -> None:
    model = tiny.lm()
    found = Curvature(model=model, sources=SOURCES, strength=0.4)(list(model.parameters()), 0)
    [coefficients] = found.vectors
    expected = oracle.curvature_coefficients(squared_gradients(model), 0.4)
    for c, e in zip(coefficients, expected, strict=True):
        assert c.dtype == torch.bfloat16  # two bytes per parameter
        np.testing.assert_allclose(c.double().numpy(), e, rtol=2**-7, atol=1e-6)
    used = np.concatenate([e.ravel() for e in expected])
    assert np.mean(used[used < 1]) == pytest.approx(0.4, abs=1e-6)
    assert found.losses["probes"] == pytest.approx(answer_losses(model, SOURCES[1].rows).mean().item(), rel=1e-5)
    assert (found.work.rows, all(p.grad is None for p in model.parameters())) == (8, True)


def test_the_damping_gives_the_share_and_shards_count_alike() -> None:
    random = torch.Generator().manual_seed(0)
    squares = [torch.randn(50, 7, generator=random).pow(8), torch.zeros(9), torch.rand(33, generator=random) * 1e-20]
    for share in (0.05, 0.5, 0.95):
        d = damping(squares, share)
        c = torch.cat([attenuation(own[own > 0].bfloat16().double(), d) for own in squares])
        assert float(c.mean()) == pytest.approx(share, abs=1e-9)
        assert damping([squares[0][:20], *squares[1:], squares[0][20:]], share) == d
    assert damping([torch.zeros(3)], 0.5) == 1.0
    assert attenuation(torch.zeros(3), 1.0).tolist() == [1.0] * 3


class Given:
    """Coefficients that are already known, 0 and 1 among them."""

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        random = torch.Generator().manual_seed(refresh)
        drawn = [torch.rand(p.shape, generator=random).mul(1.2).sub(0.1).clamp(0, 1).bfloat16() for p in params]
        return Reference(vectors=[drawn])


@pytest.mark.parametrize("own", [False, True], ids=["torch's AdamW", "our AdamW"])
def test_every_way_applies_the_stored_coefficients(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.can_compile("cpu"):
        pytest.skip("no C++ compiler on this machine")
    ends = []
    for least in (1 << 40, 0):  # the plain gate, then compiled: a pass behind hooks, or one pass with our AdamW
        monkeypatch.setattr(kernels, "WORTH_COMPILING", least)
        torch.manual_seed(1)
        bag = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in ((40, 33), (17,))])
        make = AdamW if own else torch.optim.AdamW
        optimizer = make(bag.parameters(), lr=0.01, weight_decay=0.1)
        guard = Guard(optimizer, bag, evidence=Given(), gate=Elementwise(stored, uses="coefficients", whole=False))
        seen: list[torch.Tensor] = []
        guard.observers.append(lambda _i, _proposal, c, seen=seen: seen.append(c))
        guard.refresh()
        first = copies(bag)
        for step in range(5):
            for p in bag:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            if step == 2:
                bag[1].grad = None
            optimizer.step()
        assert (guard.gating.compiled, guard.one_pass) == (not least, own and not least)
        assert guard.nbytes == 2 * sum(p.numel() for p in bag)
        for p, theta, c in zip(bag, first, guard.vectors[0], strict=True):
            assert torch.equal(p[c == 0], theta[c == 0])
        assert same(guard.vectors[0], seen[:2])
        assert guard.steps == 5
        ends.append(copies(bag))
    for plain, fast in zip(*ends, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-6, atol=1e-7)  # torch contracts products and sums
