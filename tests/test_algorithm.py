"""Algorithm 1 on hand-computed vectors, and the properties the paper states."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cplus import algorithm

floats = st.floats(-1e6, 1e6, allow_nan=False, width=32)
vectors = st.lists(st.tuples(floats, floats, floats), min_size=1, max_size=20)


def columns(rows: list[tuple[float, float, float]]) -> list[Tensor]:
    return [torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True)]


def test_two_steps_by_hand() -> None:
    # beta = 0.9. Step 1: masks 1, 0 -> coefficients 1, 0. Step 2: masks 0, 1 -> ema .09, .1, over 1 - .81.
    ema = torch.zeros(2)
    ema = algorithm.smooth(ema, algorithm.collaborates(torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])), 0.9)
    torch.testing.assert_close(algorithm.coefficient(ema, 0.9, 1), torch.tensor([1.0, 0.0]))
    ema = algorithm.smooth(ema, algorithm.collaborates(torch.tensor([1.0, 1.0]), torch.tensor([2.0, -2.0])), 0.9)
    torch.testing.assert_close(algorithm.coefficient(ema, 0.9, 2), torch.tensor([0.09 / 0.19, 0.1 / 0.19]))


def test_bias_correction_of_constant_masks() -> None:
    ema = torch.zeros(1)
    for t in range(1, 50):
        ema = algorithm.smooth(ema, torch.ones(1), 0.9)
        assert abs(float(algorithm.coefficient(ema, 0.9, t)) - 1.0) <= 2.4e-7


def test_small_products_do_not_underflow() -> None:
    tiny = torch.tensor([1e-30])
    assert float(tiny * tiny) == 0.0
    assert float(algorithm.collaborates(tiny, tiny)) == 0.0


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


def test_the_ends_of_apply_are_exact() -> None:
    theta, proposed = torch.randn(1000), torch.randn(1000) * 1e-3
    assert torch.equal(algorithm.apply(theta, proposed, torch.zeros(1000)), theta)
    assert torch.equal(algorithm.apply(theta, proposed, torch.ones(1000)), proposed)


@pytest.mark.parametrize("weight", [-0.1, 1.2, float("nan")])
def test_anchor_weight_out_of_range(weight: float) -> None:
    with pytest.raises(ValueError, match=r"anchor_weight must lie in \[0, 1\]"):
        algorithm.blend(torch.ones(1), torch.ones(1), weight)


@pytest.mark.parametrize("beta", [-0.1, 1.0, float("nan")])
def test_beta_out_of_range(beta: float) -> None:
    with pytest.raises(ValueError, match=r"beta must lie in \[0, 1\)"):
        algorithm.smooth(torch.ones(1), torch.ones(1), beta)
