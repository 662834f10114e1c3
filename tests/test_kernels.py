"""The fast gate: packed signs are exact, compiled passes equal the plain one, small averages stay within bounds."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quadratic import Bag, PastEvidence, new_gradient
from torch.optim import SGD, Optimizer

from cplus import kernels
from cplus.attach import Guard
from cplus.gates import Collaborative, Proposal
from cplus.kernels import Signs
from cplus.optim import AdamW

OPTIONS = {"lr": 0.01, "weight_decay": 0.1}
can_compile = pytest.mark.skipif(not kernels.can_compile("cpu"), reason="no C++ compiler for Inductor on this machine")


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40))
@settings(max_examples=60)
def test_packing_keeps_every_sign(values: list[float]) -> None:
    gradient = torch.tensor(values)
    assert torch.equal(Signs.of(gradient).unpacked(), gradient.sign().to(torch.int8))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (2, 3), (7, 5)])
def test_every_shape_survives_packing(shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape)
    signs = Signs.of(gradient)
    assert signs.unpacked().shape == gradient.shape
    assert torch.equal(signs.unpacked(), gradient.sign().to(torch.int8))
    assert signs.nbytes <= gradient.numel() // 4 + 1


def test_a_transposed_gradient_is_read_in_its_own_order() -> None:
    gradient = torch.randn(5, 7).T
    assert torch.equal(Signs.of(gradient).unpacked(), gradient.sign().to(torch.int8))


def train(optimizer: Optimizer, bag: Bag, guard: Guard, first: int, last: int) -> None:
    for batch in range(first, last + 1):
        if (batch - 1) % 10 == 0:
            guard.refresh()
        for p, g in zip(bag.weights, new_gradient([p.detach() for p in bag.weights], batch), strict=True):
            p.grad = g
        optimizer.step()


def build(kind: type[Optimizer], *, ema: kernels.EmaType = "float32", beta: float = 0.9, **options: float) -> tuple:
    bag = Bag(torch.float32)
    optimizer = kind(bag.weights, **options)
    return bag, optimizer, Guard(optimizer, bag, evidence=PastEvidence(), gate=Collaborative(beta=beta, ema=ema))


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WORTH_COMPILING", 0)


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WORTH_COMPILING", 10**12)


def plain_run(kind: type[Optimizer], ema: kernels.EmaType, beta: float, **options: float) -> Bag:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "WORTH_COMPILING", 10**12)
        bag, optimizer, guard = build(kind, ema=ema, beta=beta, **options)
        train(optimizer, bag, guard, 1, 200)
        assert not guard.compiled
    return bag


@can_compile
@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.usefixtures("compiling")
def test_one_pass_adamw_equals_the_plain_gate_after_200_steps(beta: float) -> None:
    expected = plain_run(torch.optim.AdamW, "float32", beta, **OPTIONS)
    bag, optimizer, guard = build(AdamW, beta=beta, **OPTIONS)
    assert guard.one_pass
    train(optimizer, bag, guard, 1, 200)
    assert guard.step_nbytes == 0
    for p, q in zip(bag.weights, expected.weights, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@can_compile
@pytest.mark.parametrize("kind", [torch.optim.AdamW, SGD])
@pytest.mark.usefixtures("compiling")
def test_the_compiled_hook_equals_the_plain_one(kind: type[Optimizer]) -> None:
    expected = plain_run(kind, "float32", 0.9, **OPTIONS)
    bag, optimizer, guard = build(kind, **OPTIONS)
    assert guard.compiled
    assert not guard.one_pass
    train(optimizer, bag, guard, 1, 200)
    for p, q in zip(bag.weights, expected.weights, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@can_compile
@pytest.mark.usefixtures("compiling")
def test_a_one_pass_run_resumes_bitwise_and_its_state_is_torchs() -> None:
    bag, optimizer, guard = build(AdamW, **OPTIONS)
    train(optimizer, bag, guard, 1, 14)
    kept = copy.deepcopy((bag.state_dict(), optimizer.state_dict(), guard.state_dict()))
    train(optimizer, bag, guard, 15, 30)
    other, other_optimizer, other_guard = build(AdamW, **OPTIONS)
    other.load_state_dict(kept[0])
    other_optimizer.load_state_dict(kept[1])
    other_guard.load_state_dict(kept[2])
    train(other_optimizer, other, other_guard, 15, 30)
    assert all(torch.equal(p, q) for p, q in zip(bag.weights, other.weights, strict=True))
    torch.optim.AdamW(bag.weights, **OPTIONS).load_state_dict(kept[1])


def test_without_a_guard_it_is_torchs_fused_adamw_bitwise() -> None:
    ours, theirs = Bag(torch.float32), Bag(torch.float32)
    for bag, optimizer in (
        (ours, AdamW(ours.weights, **OPTIONS)),
        (theirs, torch.optim.AdamW(theirs.weights, fused=True, **OPTIONS)),
    ):
        for batch in range(1, 20):
            for p, g in zip(bag.weights, new_gradient([p.detach() for p in bag.weights], batch), strict=True):
                p.grad = g
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.weights, theirs.weights, strict=True))


def proposals(seed: int) -> list[Proposal]:
    random = torch.Generator().manual_seed(seed)
    theta, proposed, g_hat = (torch.randn(500, generator=random) for _ in range(3))
    return [Proposal(theta=theta, proposed=proposed, g_hat=g_hat)]


@pytest.mark.parametrize(("kind", "half_step"), [("bfloat16", 2.0**-9), ("uint8", 0.5 / 255)])
def test_a_small_average_stays_within_its_bound(kind: kernels.EmaType, half_step: float) -> None:
    exact, small = Collaborative(beta=0.9), Collaborative(beta=0.9, ema=kind)
    for t in range(1, 100):
        step = proposals(t)
        for _ in zip(exact.coefficients(step), small.coefficients(step), strict=True):
            error = (kernels.read(small.ema[0]) - exact.ema[0]).abs().max()
        assert float(error) <= half_step / (1 - 0.9) + 1e-6
    assert small.nbytes == 500 * (1 if kind == "uint8" else 2)


def test_packed_evidence_changes_nothing() -> None:
    whole, packed = Collaborative(beta=0.9), Collaborative(beta=0.9)
    for t in range(20):
        step = proposals(t)
        signs = [Proposal(theta=p.theta, proposed=p.proposed, g_hat=Signs.of(p.g_hat)) for p in step]
        for a, b in zip(whole.coefficients(step), packed.coefficients(signs), strict=True):
            assert torch.equal(a, b)


@pytest.mark.usefixtures("compiling")
def test_what_the_kernels_do_not_take_goes_the_plain_way() -> None:
    bag = Bag(torch.float64)
    guard = Guard(AdamW(bag.weights), bag, evidence=PastEvidence(), gate=Collaborative(beta=0.9))
    assert not guard.compiled
    assert not guard.one_pass


def test_a_machine_without_a_compiler_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise RuntimeError("No working C++ compiler found")

    kernels.can_compile.cache_clear()
    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.warns(UserWarning, match="no compiled gate on cpu"):
        assert not kernels.can_compile("cpu")
    assert not kernels.can_compile("cpu")
    kernels.can_compile.cache_clear()


def test_an_unknown_average_is_refused() -> None:
    with pytest.raises(ValueError, match="float32, bfloat16 or uint8, got 'int4'"):
        Collaborative(beta=0.9, ema="int4")  # type: ignore[arg-type]


def test_a_step_counts_once_beside_torchs_own_optimizer(plainly: None) -> None:
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # from now on torch puts hook calls around its own step
    bag, optimizer, guard = build(AdamW, **OPTIONS)
    train(optimizer, bag, guard, 1, 3)
    assert guard.steps == 3
    assert guard.gate.step == 3


def test_packing_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = torch.randn(7, 9)
    whole = Signs.of(gradient)
    monkeypatch.setattr(kernels, "CHUNK", 4)
    assert torch.equal(Signs.of(gradient).packed, whole.packed)


@can_compile
def test_a_coordinate_without_a_finite_gradient_stays_where_it_is(compiling: None) -> None:
    bag, optimizer, guard = build(AdamW, **OPTIONS)
    train(optimizer, bag, guard, 1, 3)
    assert guard.one_pass
    before = [p.detach().clone() for p in bag.weights]
    gradients = [torch.full_like(p, 0.5) for p in bag.weights]
    gradients[0].view(-1)[0] = float("inf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "_check_gradients", lambda: None)  # as if another tensor's turn to be looked at had come
        for p, g in zip(bag.weights, gradients, strict=True):
            p.grad = g
        optimizer.step()
    assert all(bool(torch.isfinite(p).all()) for p in bag.weights)
    assert bag.weights[0].view(-1)[0] == before[0].view(-1)[0]
    assert not torch.equal(bag.weights[0], before[0])


@can_compile
def test_a_lone_infinity_is_found_in_its_tensors_turn(compiling: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SHARED", 0)  # every tensor counts as a large one
    bag, optimizer, guard = build(AdamW, **OPTIONS)
    guard.refresh()

    def steps() -> None:
        for _ in bag.weights:
            for p in bag.weights:
                p.grad = torch.full_like(p, 0.5)
            bag.weights[-1].grad.view(-1)[-1] = float("inf")
            optimizer.step()

    with pytest.raises(FloatingPointError, match="is not finite at step"):
        steps()
