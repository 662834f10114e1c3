"""Gates and projections against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cplus import algorithm
from cplus.gates import Collaborative, Elementwise, Gate, NormMatched, Proposal, Shuffled
from cplus.projections import agem, dot, ogd, orthonormal


def proposals(seed: int, count: int = 3) -> list[Proposal]:
    random = torch.Generator().manual_seed(seed)

    def draw(size: int) -> Tensor:
        return torch.randn(size, generator=random)

    return [Proposal(theta=draw(n), proposed=draw(n), g_hat=draw(n)) for n in range(5, 5 + count)]


GATES = {
    "cpl": lambda: Collaborative(beta=0.0),
    "cplus": lambda: Collaborative(beta=0.9),
    "norm-matched": lambda: NormMatched(Collaborative(beta=0.9)),
    "shuffled": lambda: Shuffled(Collaborative(beta=0.9), seed=3),
    "elementwise": lambda: Elementwise(lambda delta, g_hat: torch.sigmoid(-delta * g_hat)),
}


@pytest.mark.parametrize("name", GATES)
@settings(max_examples=20)
@given(seeds=st.lists(st.integers(0, 10_000), min_size=1, max_size=6))
def test_coefficients_lie_in_the_unit_interval(name: str, seeds: list[int]) -> None:
    gate: Gate = GATES[name]()
    for seed in seeds:
        for c in gate.coefficients(proposals(seed)):
            assert bool(((c >= 0) & (c <= 1)).all())


@pytest.mark.parametrize("name", GATES)
def test_a_kept_state_continues_bitwise(name: str) -> None:
    gate, other = GATES[name](), GATES[name]()
    for seed in range(4):
        list(gate.coefficients(proposals(seed)))
    other.load_state_dict(gate.state_dict())
    for seed in range(4, 8):
        pairs = zip(gate.coefficients(proposals(seed)), other.coefficients(proposals(seed)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_gate_by_a_function_is_that_function_and_stays_in_the_unit_interval() -> None:
    gate = Elementwise(lambda delta, g_hat: algorithm.collaborates(g_hat, delta))
    pairs = zip(gate.coefficients(proposals(0)), Collaborative(beta=0.0).coefficients(proposals(0)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    for wrong in (lambda delta, g_hat: 1.0 + delta.abs(), lambda delta, g_hat: -delta.abs()):
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\], one for each of \(5,\) coordinates"):
            list(Elementwise(wrong).coefficients(proposals(0)))
    with pytest.raises(ValueError, match=r"got \(\) from 1 to 1"):
        list(Elementwise(lambda delta, g_hat: torch.tensor(1.0)).coefficients(proposals(0)))
    nans = Elementwise(lambda delta, g_hat: delta * float("nan"))
    with pytest.raises(ValueError, match="from nan to nan"):
        list(nans.coefficients(proposals(0)))


def test_the_smoothed_gate_is_the_algorithm() -> None:
    gate, ema = Collaborative(beta=0.9), [torch.zeros(5), torch.zeros(6), torch.zeros(7)]
    for t in range(1, 6):
        step = proposals(t)
        for i, (proposal, c) in enumerate(zip(step, gate.coefficients(step), strict=True)):
            ema[i] = algorithm.smooth(ema[i], algorithm.collaborates(proposal.g_hat, proposal.delta), 0.9)
            assert torch.equal(c, algorithm.coefficient(ema[i], 0.9, t))


def test_norm_matched_applies_the_norm_of_the_inner_gate() -> None:
    inner, control = Collaborative(beta=0.9), NormMatched(Collaborative(beta=0.9))
    for seed in range(6):
        step = proposals(seed)
        applied = [
            torch.cat([c * p.delta for c, p in zip(gate.coefficients(step), step, strict=True)])
            for gate in (inner, control)
        ]
        assert float(applied[1].norm()) == pytest.approx(float(applied[0].norm()), rel=1e-6)
        whole = torch.cat([p.delta for p in step])
        assert float(torch.cosine_similarity(applied[1], whole, dim=0)) == pytest.approx(1.0, abs=1e-6)


def test_shuffled_keeps_each_multiset_and_breaks_placement() -> None:
    inner, control = Collaborative(beta=0.9), Shuffled(Collaborative(beta=0.9), seed=0)
    moved = 0
    for seed in range(6):
        step = proposals(seed)
        for a, b in zip(inner.coefficients(step), control.coefficients(step), strict=True):
            assert torch.equal(a.sort().values, b.sort().values)
            moved += int((a != b).sum())
    assert moved > 0


def flat(vectors: list[Tensor]) -> Tensor:
    return torch.cat([v.flatten() for v in vectors]).double()


def gradients(seed: int) -> list[Tensor]:
    return [p.theta for p in proposals(seed)]


@pytest.mark.parametrize("seed", range(6))
def test_agem_per_tensor_equals_the_flat_formula(seed: int) -> None:
    g, r = gradients(seed), gradients(seed + 100)
    a, b = flat(g), flat(r)
    expected = a - (a @ b) / (b @ b) * b if a @ b < 0 else a
    agem(g, r)
    torch.testing.assert_close(flat(g), expected, rtol=1e-6, atol=1e-6)


def test_agem_meets_both_cases() -> None:
    signs = {bool(dot(gradients(seed), gradients(seed + 100)) < 0) for seed in range(6)}
    assert signs == {True, False}


@pytest.mark.parametrize("seed", range(3))
def test_ogd_per_tensor_equals_the_flat_formula(seed: int) -> None:
    g, vectors = gradients(seed), [gradients(seed + k) for k in (10, 20, 30)]
    q, _ = torch.linalg.qr(torch.stack([flat(v) for v in vectors], dim=1))
    expected = flat(g) - q @ (q.T @ flat(g))
    ogd(g, orthonormal(vectors))
    torch.testing.assert_close(flat(g), expected, rtol=1e-5, atol=1e-6)
