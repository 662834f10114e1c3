"""Gates and projections against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cplus.core.gates import (
    Collaborative,
    Elementwise,
    Gate,
    NormMatched,
    Proposal,
    Shuffled,
    cautious,
    largest_momenta,
)
from cplus.methods.variants import agem, ogd, orthonormal


def proposals(seed: int, count: int = 3) -> list[Proposal]:
    random = torch.Generator().manual_seed(seed)

    def draw(size: int) -> Tensor:
        return torch.randn(size, generator=random)

    return [Proposal(draw(n), draw(n), draw(n), draw(n), draw(n)) for n in range(5, 5 + count)]


GATES = {
    "cpl": lambda: Collaborative(beta=0.0),
    "cplus": lambda: Collaborative(beta=0.9),
    "norm-matched": lambda: NormMatched(Collaborative(beta=0.9)),
    "shuffled": lambda: Shuffled(Collaborative(beta=0.9), seed=3),
    "elementwise": lambda: Elementwise(lambda p: torch.sigmoid(-p.delta * p.sign)),
    "cautious": lambda: Elementwise(cautious, uses="nothing", whole=False),
    "mofo": lambda: Elementwise(lambda p: largest_momenta(p, 0.4), uses="nothing"),
}


def by_hand() -> list[Proposal]:
    """Updates 2 and -1, then 4: the evidence is against the first and the last."""
    first = Proposal(
        theta=torch.tensor([[1.0], [1.0]]), proposed=torch.tensor([[3.0], [0.0]]), g_hat=torch.tensor([[1.0], [1.0]])
    )
    return [first, Proposal(theta=torch.tensor([0.0]), proposed=torch.tensor([4.0]), g_hat=torch.tensor([0.5]))]


def turned() -> list[Proposal]:
    return [Proposal(theta=p.theta, proposed=p.proposed, g_hat=-p.g_hat) for p in by_hand()]


def test_three_steps_by_hand() -> None:
    # 0.25, then 0.25 * 0.75 with nothing added or 0.25; over 1 - 0.75, 1 - 0.75**2, 1 - 0.75**3
    second, third = [0.25 / 0.4375, 0.1875 / 0.4375], [0.1875 / 0.578125, 0.390625 / 0.578125]
    for beta, shares in ((0.0, ([0.0, 1.0], [1.0, 0.0], [0.0, 1.0])), (0.75, ([0.0, 1.0], second, third))):
        gate = Collaborative(beta=beta)
        for t, (step, (against, along)) in enumerate(zip((by_hand(), turned(), by_hand()), shares, strict=True), 1):
            matrix, vector = gate.coefficients(step)
            expected = torch.tensor([against, along, against])
            torch.testing.assert_close(torch.cat([matrix[:, 0], vector]), expected, rtol=1e-6, atol=0.0)
            assert gate.average.step == t


def test_the_gate_of_the_paper_counts_and_remembers() -> None:
    gate = Collaborative(beta=0.75)
    assert (gate.tally(), gate.nbytes) == ((0, 0), 0)
    list(gate.coefficients(by_hand()))
    list(gate.coefficients(turned()))
    list(gate.coefficients(turned()))
    assert gate.tally() == (1 + 2 + 2, 9)
    assert gate.tally() == (0, 0)
    list(gate.coefficients(by_hand()))
    assert gate.tally() == (1, 3)
    assert gate.nbytes == 3 * 4
    memoryless = Collaborative(beta=0.0)
    list(memoryless.coefficients(by_hand()))
    assert (memoryless.tally(), memoryless.nbytes, memoryless.average.tensors) == ((1, 3), 0, [])
    with pytest.raises(ValueError, match="float32, bfloat16 or uint8, got 'int4'"):
        Collaborative(beta=0.9, ema="int4")  # type: ignore[arg-type]


def test_a_kept_state_of_other_shapes_is_refused() -> None:
    gate, fresh, other = (Collaborative(beta=0.75) for _ in range(3))
    list(gate.coefficients(by_hand()))
    kept, params = gate.state_dict(), [p.theta for p in by_hand()]
    fresh.load_state_dict(kept, params)
    gate.load_state_dict(kept, params)
    assert (fresh.average.step, [e.tolist() for e in fresh.average.tensors]) == (1, [[[0.0], [0.25]], [0.0]])
    for size in (1, 9):  # either side of the kept shapes, in every order there is
        with pytest.raises(ValueError, match="parameters of other shapes"):
            other.load_state_dict(kept, [torch.zeros(size), torch.zeros(size)])


def test_cautious_keeps_what_descends_the_new_datas_gradient() -> None:
    zero = torch.zeros(4)
    step = Proposal(zero, torch.tensor([-1.0, 1.0, 2.0, 0.0]), gradient=torch.tensor([3.0, 3.0, 0.0, -1.0]))
    assert cautious(step).tolist() == [1.0, 0.0, 1.0, 1.0]
    assert cautious(Proposal(zero, zero)).tolist() == [1.0] * 4  # no gradient in this step: nothing is proposed


def test_the_largest_momenta_by_hand() -> None:
    zero, m = torch.zeros(2, 3), torch.tensor([[3.0, -5.0, 1.0], [0.0, 5.0, -4.0]])
    step = Proposal(zero, zero, gradient=m, momentum=m)
    assert largest_momenta(step, 0.15).tolist() == [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]  # one of six, and its equal
    assert largest_momenta(step, 0.5).tolist() == [[0.0, 1.0, 0.0], [0.0, 1.0, 1.0]]
    assert largest_momenta(step, 1.0).tolist() == [[1.0] * 3] * 2
    assert largest_momenta(Proposal(zero, zero), 0.5).tolist() == [[1.0] * 3] * 2
    with pytest.raises(TypeError, match="keeps its first moment in a form that cannot be read; use AdamW"):
        largest_momenta(Proposal(zero, zero, gradient=m), 0.5)


def test_a_gate_by_a_function_may_reach_both_ends_and_not_pass_them() -> None:
    [closed, opened] = Elementwise(lambda p: (p.delta * p.sign <= 0).float()).coefficients([by_hand()[0], turned()[1]])
    assert (closed.tolist(), opened.tolist()) == ([[0.0], [1.0]], [1.0])
    for wrong in (-0.01, 1.01):
        ends = torch.tensor([[0.5], [wrong]])
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
            list(Elementwise(lambda p, c=ends: c).coefficients(by_hand()[:1]))
    for shape in ((1,), (2,), (2, 2), (3, 1)):
        with pytest.raises(ValueError, match=r"one for each of \(2, 1\) coordinates, got"):
            list(Elementwise(lambda p, c=shape: torch.full(c, 0.5)).coefficients(by_hand()[:1]))
    gate = Elementwise(lambda p: p.delta)
    assert (gate.nbytes, gate.state_dict()) == (0, {})


def test_the_norms_are_taken_in_double_precision() -> None:
    random = torch.Generator().manual_seed(1)
    theta, g_hat = torch.zeros(4099), torch.randn(4099, generator=random)
    proposed = torch.randn(4099, generator=random)
    [c] = NormMatched(Collaborative(beta=0.0)).coefficients([Proposal(theta=theta, proposed=proposed, g_hat=g_hat)])
    wide = proposed.double()
    ratio = (wide[wide * g_hat.double() <= 0].square().sum() / wide.square().sum()).sqrt()
    assert c.dtype == torch.float32
    assert torch.equal(c, ratio.float().expand(4099))
    still = torch.ones(3, dtype=torch.bfloat16)  # a step of no length
    [c] = NormMatched(Collaborative(beta=0.0)).coefficients([Proposal(theta=still, proposed=still, g_hat=still)])
    assert (c.dtype, c.tolist()) == (torch.float32, [1.0] * 3)


def test_the_shuffle_is_the_seeds() -> None:
    inner, gate = Collaborative(beta=0.75), Shuffled(Collaborative(beta=0.75), seed=3)
    random = torch.Generator().manual_seed(3)
    for seed in range(3):
        p = proposals(seed, 1)[0]
        step = [
            Proposal(theta=p.theta[:4].view(2, 2), proposed=p.proposed[:4].view(2, 2), g_hat=p.g_hat[:4].view(2, 2))
        ]
        [plain], [mixed] = list(inner.coefficients(step)), list(gate.coefficients(step))
        assert torch.equal(mixed, plain.flatten()[torch.randperm(4, generator=random)].view(2, 2))
    assert gate.nbytes == 4 * 4


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
    other.load_state_dict(gate.state_dict(), [p.theta for p in proposals(0)])
    for seed in range(4, 8):
        pairs = zip(gate.coefficients(proposals(seed)), other.coefficients(proposals(seed)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_the_smoothed_gate_is_the_average_of_the_sign_masks_without_its_start() -> None:
    """Computed by hand in plain Python: c = sum_k beta^(t-k) (1-beta) mask_k / (1 - beta^t)."""
    gate, masks = Collaborative(beta=0.9), [[], [], []]
    for t in range(1, 6):
        step = proposals(t)
        for i, (proposal, c) in enumerate(zip(step, gate.coefficients(step), strict=True)):
            pairs = zip(proposal.sign.tolist(), proposal.delta.tolist(), strict=True)
            masks[i].append([float(g * d <= 0) for g, d in pairs])
            weights = [0.1 * 0.9 ** (t - k) / (1 - 0.9**t) for k in range(1, t + 1)]
            expected = [sum(w * m for w, m in zip(weights, past, strict=True)) for past in zip(*masks[i], strict=True)]
            assert c.tolist() == pytest.approx(expected, abs=1e-6)
            assert 0 < sum(expected) < len(expected)


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


def flat(vectors: list[Tensor]) -> Tensor:
    return torch.cat([v.flatten() for v in vectors]).double()


def gradients(seed: int) -> list[Tensor]:
    return [p.theta for p in proposals(seed)]


def test_agem_and_ogd_per_tensor_equal_the_flat_formulas() -> None:
    signs = set()
    for seed in range(6):
        g, r = gradients(seed), gradients(seed + 100)
        a, b = flat(g), flat(r)
        signs.add(bool(a @ b < 0))
        agem(g, r)
        torch.testing.assert_close(flat(g), a - min(a @ b, 0) / (b @ b) * b, rtol=1e-6, atol=1e-6)
        g, vectors = gradients(seed), [gradients(seed + k) for k in (10, 20, 30)]
        q, _ = torch.linalg.qr(torch.stack([flat(v) for v in vectors], dim=1))
        expected = flat(g) - q @ (q.T @ flat(g))
        ogd(g, orthonormal(vectors))
        torch.testing.assert_close(flat(g), expected, rtol=1e-5, atol=1e-6)
    assert signs == {True, False}  # both cases of A-GEM
