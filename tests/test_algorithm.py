"""Algorithm 1 on hand-computed vectors, and the properties the paper states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracle
import pytest
import quadratic
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cplus.core import algorithm

floats = st.floats(-1e6, 1e6, allow_nan=False, width=32)
vectors = st.lists(st.tuples(floats, floats, floats), min_size=1, max_size=20)


def columns(rows: list[tuple[float, float, float]]) -> list[Tensor]:
    return [torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True)]


def test_every_line_by_hand() -> None:
    anchor, probe = torch.tensor([4.0, 8.0]), torch.tensor([-2.0, 1.0])
    for weight, blended in ((0.25, [-0.5, 2.75]), (0.0, [-2.0, 1.0]), (1.0, [4.0, 8.0])):
        assert algorithm.blend(anchor, probe, weight).tolist() == blended
    ema, mask = torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.0])
    assert algorithm.smooth(ema, mask, 0.75).tolist() == [0.625, 0.1875]
    assert algorithm.smooth(ema, mask, 0.0).tolist() == [1.0, 0.0]
    finer = algorithm.smooth(ema.double()[:1], torch.ones(1), 0.9)
    assert finer.tolist() == [0.9 * 0.5 + (1.0 - 0.9)]  # not the 1 - 0.9 of float32
    ema = torch.tensor([0.375, 0.9, 0.0, -0.1])
    assert algorithm.coefficient(ema, 0.5, 2).tolist() == [0.5, 1.0, 0.0, 0.0]
    theta, proposed, c = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0]), torch.tensor([0.25, 0.5])
    assert algorithm.apply(theta, proposed, c).tolist() == [1.5, 1.0]
    assert algorithm.apply(theta.bfloat16(), proposed.bfloat16(), c).tolist() == [1.5, 1.0]


def test_the_mask_of_every_pair_of_signs() -> None:
    g_hat = torch.tensor([-3.0, 0.0, 3.0]).repeat_interleave(3)
    mask = algorithm.collaborates(g_hat, torch.tensor([-2.0, 0.0, 2.0]).repeat(3))
    assert mask.dtype == torch.float32
    assert mask.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]


def test_the_first_average_is_zero_and_never_coarser_than_float32() -> None:
    for kind, kept in ((torch.float64, torch.float64), *((own, torch.float32) for own in (torch.float32, torch.half))):
        first = algorithm.zeros(torch.ones(2, 3, dtype=kind))
        assert (first.dtype, first.tolist()) == (kept, [[0.0] * 3] * 2)


def test_the_plain_loop_is_the_oracle() -> None:
    def other_past(theta: list[Tensor]) -> list[Tensor]:
        return [p - goal for p, goal in zip(theta, quadratic.targets(8, torch.float64), strict=True)]

    def propose(theta: list[Tensor], batch: int) -> list[Tensor]:
        return [p - 0.3 * g for p, g in zip(theta, quadratic.new_gradient(theta, batch), strict=True)]

    def by_numpy(gradient: Callable[..., list[Tensor]]) -> Callable[..., list[np.ndarray]]:
        return lambda theta, *batch: [g.numpy() for g in gradient([torch.from_numpy(p) for p in theta], *batch)]

    def evidence(theta: list[Tensor]) -> list[Tensor]:
        return [0.5 * a + 0.5 * b for a, b in zip(quadratic.past_gradient(theta), other_past(theta), strict=True)]

    start = quadratic.copies(quadratic.Bag(torch.float64).weights)
    gradients = {"anchor_gradient": quadratic.past_gradient, "probe_gradient": other_past}
    found = algorithm.run(start, epochs=[range(1, 5), range(5, 9), range(9, 13)], propose=propose, **gradients)
    numbers, pulls = [p.numpy() for p in start], (by_numpy(quadratic.new_gradient), by_numpy(evidence))
    expected = oracle.gated_steps(numbers, oracle.sgd(0.3), *pulls, steps=12, refresh_every=4, beta=0.9)
    for p, q in zip(found, expected[-1], strict=True):
        np.testing.assert_allclose(p.numpy(), q, rtol=1e-9, atol=1e-12)


def test_bias_correction_of_constant_masks() -> None:
    ema = torch.zeros(1)
    for t in range(1, 50):
        ema = algorithm.smooth(ema, torch.ones(1), 0.9)
        assert abs(float(algorithm.coefficient(ema, 0.9, t)) - 1.0) <= 2.4e-7


def test_small_products_do_not_underflow() -> None:
    tiny = torch.tensor([1e-30])
    assert float(tiny * tiny) == float(algorithm.collaborates(tiny, tiny)) == 0.0


def test_the_ends_of_apply_are_exact() -> None:
    theta, proposed = torch.randn(1000), torch.randn(1000) * 1e-3
    assert torch.equal(algorithm.apply(theta, proposed, torch.zeros(1000)), theta)
    assert torch.equal(algorithm.apply(theta, proposed, torch.ones(1000)), proposed)


def test_settings_out_of_range_are_refused() -> None:
    one = torch.ones(1)
    for weight in (-0.1, 1.2, float("nan")):
        with pytest.raises(ValueError, match=r"anchor_weight must lie in \[0, 1\]"):
            algorithm.blend(one, one, weight)
    for beta in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"beta must lie in \[0, 1\)"):
            algorithm.smooth(one, one, beta)


@given(vectors)
def test_binary_mask_never_raises_the_linearised_loss(rows: list[tuple[float, float, float]]) -> None:
    g_hat, delta, _ = columns(rows)
    mask = algorithm.collaborates(g_hat, delta)
    assert float((g_hat.double() * (mask * delta).double()).sum()) <= 0.0


@given(vectors, st.floats(0.0, 0.999), st.integers(1, 200))
def test_applied_coordinates_never_exceed_or_reverse(
    rows: list[tuple[float, float, float]], beta: float, t: int
) -> None:
    ema, theta, delta = columns(rows)
    c = algorithm.coefficient(ema.abs(), beta, t)
    assert bool(((c >= 0) & (c <= 1)).all())
    proposed = theta + delta
    applied = algorithm.apply(theta, proposed, c)
    low, high = torch.minimum(theta, proposed), torch.maximum(theta, proposed)
    assert bool(((applied >= low) & (applied <= high)).all())


@given(vectors, st.floats(1e-3, 1e3))
def test_scaling_the_evidence_changes_nothing(rows: list[tuple[float, float, float]], scale: float) -> None:
    g_hat, delta, _ = columns(rows)
    scaled = (g_hat.double() * scale).double()
    assert torch.equal(algorithm.collaborates(g_hat.double(), delta), algorithm.collaborates(scaled, delta))


@given(vectors, st.floats(0.0, 1.0))
def test_blending_is_linear(rows: list[tuple[float, float, float]], weight: float) -> None:
    a, b, c = (column.double() for column in columns(rows))
    left = algorithm.blend(a + c, b + c, weight)
    torch.testing.assert_close(left, algorithm.blend(a, b, weight) + c, rtol=1e-9, atol=1e-6)
