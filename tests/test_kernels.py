"""The fast gate: packed signs are exact, compiled passes equal the plain one, small averages stay within bounds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import pytest
import torch
from quadratic import Bag, PastEvidence, new_gradient
from torch._inductor import config as inductor
from torch.optim import SGD, Optimizer

from cplus.core import algorithm, kernels
from cplus.core.gates import Collaborative, Proposal
from cplus.core.guard import Guard
from cplus.core.kernels import Signs
from cplus.core.optim import AdamW

OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


def test_the_packed_bytes_by_hand() -> None:
    signs = Signs.of(torch.tensor([[3.0, -1.0, -2.0], [0.0, 1e-30, 5.0], [0.0, -7.0, -4.0], [0.0, 1.0, -9.0]]))
    # in order: + - - 0, + + 0 -, - 0 + -
    assert signs.packed.dtype == torch.uint8
    assert signs.packed.tolist() == [1 + 2 * 4 + 2 * 16, 1 + 1 * 4 + 2 * 64, 2 + 1 * 16 + 2 * 64]
    assert Signs.of(torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, 1.0, -1.0])).packed[1:].tolist() == [2 + 1 * 4 + 2 * 16]


def test_how_an_average_is_kept_and_read() -> None:
    average = torch.tensor([0.0, 0.2, 0.7, 1.0])
    levels = kernels.stored(average, torch.zeros(4, dtype=torch.uint8))
    assert (levels.dtype, levels.tolist()) == (torch.uint8, [0, 51, 178, 255])  # 0.7 * 255 = 178.5, below it in float32
    assert kernels.read(levels).tolist() == torch.tensor([0.0, 51 / 255, 178 / 255, 1.0]).tolist()
    short = kernels.stored(average, torch.zeros(4, dtype=torch.bfloat16))
    assert (short.dtype, kernels.read(short).dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(kernels.read(short), average.bfloat16().float())
    for kind in (torch.float32, torch.float64):
        kept = kernels.stored(average.to(kind), torch.zeros(4, dtype=kind))
        assert (kept.dtype, kernels.read(kept).dtype) == (kind, kind)
        assert torch.equal(kernels.read(kept), average.to(kind))


KINDS = (torch.float32, torch.bfloat16, torch.uint8)
each_kind = pytest.mark.parametrize("kind", KINDS)

needs_compiler = pytest.mark.skipif(not kernels.can_compile("cpu"), reason="no C++ compiler on this machine")


def as_written(block: Callable[..., None]) -> Callable[..., None]:
    """The form for other devices, uncompiled, with the arguments of the form for the CPU."""

    def run(*arguments: Any) -> None:
        *tensors, signs, ema, numbers = arguments
        flat = [tensor.view(-1) for tensor in tensors]
        values = kernels.scalars(numbers, torch.device("cpu"))
        block(*flat, signs.packed, None if ema is None else ema.view(-1), values)

    return run


FORMS = [
    pytest.param((kernels.gate, kernels.adamw), id="native", marks=needs_compiler),
    pytest.param((as_written(kernels.gate_block), as_written(kernels.adamw_block)), id="written"),
]
each_form = pytest.mark.parametrize("form", FORMS)
Form: TypeAlias = tuple[Callable[..., None], Callable[..., None]]


def blocks(count: int, seed: int = 0) -> list[torch.Tensor]:
    """So many blocks of 64 coordinates, and evidence of all three signs in which every pair of signs meets."""
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(4, 16, generator=random) for _ in range(count + 1)]
    drawn[-1][:, ::5] = 0.0
    return drawn


def kept_average(kind: torch.dtype) -> torch.Tensor:
    drawn = torch.rand(4, 16, generator=torch.Generator().manual_seed(9))
    # Levels that are multiples of 4 never come to lie half-way between two by beta = 0.75.
    if kind == torch.uint8:
        return (drawn * 63).round().mul(4).to(kind)
    drawn[0, 0] = -0.9  # no mask leads there; the formula cuts it off all the same
    return drawn.to(kind)


def gate_by_formula(
    theta: torch.Tensor, proposed: torch.Tensor, g_hat: torch.Tensor, ema: torch.Tensor, correction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Lines 10-13 with beta = 0.75 in NumPy's float64: the parameters, and the average before it is rounded."""
    wide = [t.double().numpy() for t in (theta, proposed, g_hat)]
    before = ema.double().numpy() / (255 if ema.dtype == torch.uint8 else 1)
    average = 0.75 * before + 0.25 * (wide[2] * (wide[1] - wide[0]) <= 0)
    if ema.dtype == torch.uint8:
        rounded = np.round(average * 255) / 255
    else:
        rounded = torch.from_numpy(average).to(ema.dtype).double().numpy()
    return wide[0] + np.clip(rounded / correction, 0, 1) * (wide[1] - wide[0]), rounded


@each_form
@each_kind
def test_the_gate_is_the_formula(kind: torch.dtype, form: Form) -> None:
    theta, param, g_hat = blocks(2)
    param[:, ::7] = theta[:, ::7]
    ema = kept_average(kind)
    expected, average = gate_by_formula(theta, param, g_hat, ema, 0.8)  # a small correction, so that some are clipped
    still = theta.clone()
    form[0](theta, param, Signs.of(g_hat), ema, (0.75, 0.25, 0.8))
    np.testing.assert_allclose(param.numpy(), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(kernels.read(ema).numpy(), average, rtol=1e-6, atol=1e-6)
    assert ema.dtype == kind
    assert torch.equal(theta, still)


ADAM = {"rest1": 0.3, "beta2": 0.6, "rest2": 0.5, "decay": 0.97, "step": 0.2, "root": 1.7, "eps": 0.05}


def adam_by_formula(
    param: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    p, g, m64, v64 = (t.double().numpy() for t in (param, gradient, m, v))
    first = m64 + ADAM["rest1"] * (g - m64)
    second = ADAM["beta2"] * v64 + ADAM["rest2"] * g * g
    return p * ADAM["decay"] - ADAM["step"] * first / (np.sqrt(second) * ADAM["root"] + ADAM["eps"]), first, second


@each_form
@each_kind
def test_the_one_pass_is_the_formula(kind: torch.dtype, form: Form) -> None:
    param, gradient, m, v, g_hat = blocks(4)
    v.abs_()
    ema = kept_average(kind)
    proposed, first, second = adam_by_formula(param, gradient, m, v)
    expected, average = gate_by_formula(param, torch.from_numpy(proposed), g_hat, ema, 0.8)
    form[1](param, gradient, m, v, Signs.of(g_hat), ema, (*ADAM.values(), 0.75, 0.25, 0.8))
    for found, wanted in ((param, expected), (m, first), (v, second), (kernels.read(ema), average)):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-6)


@each_form
@pytest.mark.parametrize("rest1", [0.3, 0.7])
def test_a_gradient_that_is_no_number_proposes_nothing_and_the_largest_is_one(rest1: float, form: Form) -> None:
    param, gradient, m, v, g_hat = (torch.ones(4, 1) for _ in range(5))
    gradient[:, 0] = torch.tensor([float("inf"), float("-inf"), float("nan"), torch.finfo(torch.float32).max])
    ema = torch.full((4, 1), 0.5)
    form[1](param, gradient, m, v, Signs.of(g_hat), ema, (*(ADAM | {"rest1": rest1}).values(), 0.75, 0.25, 1.0))
    assert param[:3].tolist() == m[:3].tolist() == v[:3].tolist() == [[1.0]] * 3
    assert float(m[3]) > 1e37
    assert ema[:3].tolist() == [[0.625]] * 3  # nothing proposed is nothing in conflict


SIZES = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 127, 128, 129, 131, 255, 256, 515, 40003]


@each_form
@pytest.mark.parametrize("count", SIZES)
def test_every_size_is_gated_alike(count: int, form: Form) -> None:
    random = torch.Generator().manual_seed(count)
    theta, param, g_hat = (torch.randn(count, generator=random) for _ in range(3))
    ema = torch.rand(count, generator=random)
    expected, average = gate_by_formula(theta, param, g_hat, ema, 0.8)
    form[0](theta, param, Signs.of(g_hat), ema, (0.75, 0.25, 0.8))
    np.testing.assert_allclose(param.numpy(), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(ema.numpy(), average, rtol=1e-6, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("count", [40003, 300_001])
@each_kind
def test_threads_and_places_change_no_bit(kind: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same coordinates in one tensor on three threads, and cut into pieces of odd sizes on one."""
    random = torch.Generator().manual_seed(count)
    tensors = [torch.randn(count, generator=random) for _ in range(4)]
    tensors[3].abs_()
    g_hat, ema = torch.randn(count, generator=random), kernels.stored(torch.rand(count), torch.zeros(0, dtype=kind))
    numbers = (*ADAM.values(), 0.9, 0.1, 0.8)
    pieces = [
        [*map(torch.clone, (t[start : start + 4001] for t in (*tensors, g_hat, ema)))]
        for start in range(0, count, 4001)
    ]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    kernels.adamw(*tensors, Signs.of(g_hat), ema, numbers)
    for *piece, evidence, average in pieces:
        kernels.adamw(*piece, Signs.of(evidence), average, numbers)
    for whole, parts in zip((*tensors, g_hat, ema), zip(*pieces, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))


@each_form
@pytest.mark.parametrize("kind", [*KINDS, None])
def test_the_first_step_is_the_mask_exactly(kind: torch.dtype | None, form: Form) -> None:
    theta, param, g_hat = (part.flatten() for part in blocks(2))
    proposed, conflict = param.clone(), algorithm.collaborates(g_hat, param - theta) == 0
    ema = None if kind is None else torch.zeros(64, dtype=kind)
    form[0](theta, param, Signs.of(g_hat), ema, kernels.gate_numbers(0.9 if kind else 0.0, 1))
    assert torch.equal(param, torch.where(conflict, theta, proposed))


@each_form
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.uint8])
def test_a_small_average_is_rounded_as_it_is_kept(kind: torch.dtype, form: Form) -> None:
    """Every level, and 16-bit numbers, after one step with and without conflict: halves go to the even neighbour."""
    count = 1 << 8
    before = torch.arange(count, dtype=torch.uint8) if kind == torch.uint8 else torch.linspace(0, 1, count).to(kind)
    for sign, mask in ((1.0, 0.0), (-1.0, 1.0)):
        for beta in (0.5, 0.9, 0.999):
            theta, param, ema = torch.zeros(count), torch.ones(count), before.clone()
            form[0](theta, param, Signs.of(torch.full((count,), sign)), ema, kernels.gate_numbers(beta, 100))
            average = algorithm.smooth(kernels.read(before), torch.full((count,), mask), beta)
            assert torch.equal(ema, kernels.stored(average, before))
            assert torch.equal(param, algorithm.coefficient(kernels.read(ema), beta, 100))


@needs_compiler
def test_a_kernel_refuses_what_it_would_misread() -> None:
    theta, param, ema, signs = torch.ones(8), torch.ones(8), torch.ones(8), Signs.of(torch.ones(8))
    numbers = (0.75, 0.25, 0.8)
    wrong: list[tuple[Any, ...]] = [
        (theta[:4], param, signs, ema, numbers),
        (theta, param.double(), signs, ema, numbers),
        (theta, torch.ones(16)[::2], signs, ema, numbers),
        (theta, param, Signs.of(torch.ones(12)), ema, numbers),
        (theta, param, signs, torch.ones(4), numbers),
        (theta, param.to("meta"), signs, ema, numbers),
    ]
    for case in wrong:
        with pytest.raises(ValueError, match="the compiled gate takes"):
            kernels.gate(*case)


@needs_compiler
def test_a_transposed_gradient_is_copied_into_order() -> None:
    tensors = [torch.rand(5, 7) for _ in range(4)]
    others = [tensor.clone() for tensor in tensors]
    gradient, g_hat, numbers = torch.randn(7, 5).T, torch.randn(5, 7), (*ADAM.values(), 0.75, 0.25, 0.8)
    tensors[1], others[1] = gradient, gradient.contiguous()
    kernels.adamw(*tensors, Signs.of(g_hat), None, numbers)
    kernels.adamw(*others, Signs.of(g_hat), None, numbers)
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


@needs_compiler
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_the_form_for_other_devices_is_one_graph_for_every_size(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel, compiled for the CPU, on sizes it was not compiled for; only the longer form writes C++."""
    kernels.compiled.cache_clear()
    if backend == "aot_eager":
        real = torch.compile
        monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, dynamic=True, fullgraph=True, backend=backend))
    with inductor.patch({"force_disable_caches": True}):  # code kept from a run with other instructions may not compile
        kernel = kernels.compiled(kernels.adamw_block, torch.uint8, torch.device("cpu"))
    kernels.compiled.cache_clear()
    for count in (4, 7, 30, 5000):
        random = torch.Generator().manual_seed(count)
        tensors = [torch.rand(count, generator=random) for _ in range(4)]
        g_hat = torch.randn(count, generator=random)
        ema = (torch.rand(count, generator=random) * 63).round().mul(4).to(torch.uint8)
        others, other = [tensor.clone() for tensor in tensors], ema.clone()
        numbers = (*ADAM.values(), 0.75, 0.25, 0.8)
        kernels.adamw(*tensors, Signs.of(g_hat), ema, numbers)
        kernel(*others, Signs.of(g_hat).packed, other, kernels.scalars(numbers, torch.device("cpu")))
        assert torch.equal(ema, other)
        for a, b in zip(tensors, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_machine_without_a_compiler_is_told_once_what_is_missing(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = "a C compiler" if find_spec("triton") else "Triton"
    missing = r"a C\+\+ compiler" if device == "cpu" else triton
    for error in (RuntimeError, OSError, ImportError):
        refuse = mock.Mock(side_effect=error("No working C++ compiler found"))
        kernels.can_compile.cache_clear()
        monkeypatch.setattr(torch, "compile", refuse)
        monkeypatch.setattr(kernels, "library", refuse)
        with pytest.warns(UserWarning, match=rf"no compiled gate on {device}.* lacks is {missing}") as told:
            answers = [kernels.can_compile(device) for _ in range(2)]
        assert (answers, len(told)) == ([False, False], 1)
    kernels.can_compile.cache_clear()


def test_which_parameters_the_kernels_take(compiling: None) -> None:
    own = type("Own", (torch.nn.Parameter,), {})
    large = torch.empty(1 << 31, device="meta")  # Triton would index it with 32 bits
    assert all(kernels.fits(p) for p in (torch.ones(4), torch.nn.Parameter(torch.ones(2, 3)), large[1:]))
    kinds = [torch.ones(4, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)]
    assert not any(kernels.fits(p) for p in (torch.ones(3), *kinds, torch.ones(3, 4).T, own(torch.ones(4)), large))
    bag = Bag(torch.float64)
    guard = Guard(AdamW(bag.weights), bag, evidence=PastEvidence(), gate=Collaborative(beta=0.9))
    assert (guard.gating.compiled, guard.one_pass) == (False, False)  # the plain way


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (2, 3), (7, 5)])
def test_every_shape_survives_packing_in_chunks_of_any_size(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient = torch.randn(shape)
    for chunk in (kernels.CHUNK, 1, 4, 5):
        monkeypatch.setattr(kernels, "CHUNK", chunk)
        signs = Signs.of(gradient)
        assert torch.equal(signs.unpacked(), gradient.sign().to(torch.int8))
        assert signs.nbytes <= gradient.numel() // 4 + 1


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


def plain_run(kind: type[Optimizer], ema: kernels.EmaType, beta: float, **options: float) -> Bag:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "WORTH_COMPILING", 10**12)
        bag, optimizer, guard = build(kind, ema=ema, beta=beta, **options)
        train(optimizer, bag, guard, 1, 200)
        assert not guard.gating.compiled
    return bag


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.usefixtures("compiling")
def test_one_pass_adamw_equals_the_plain_gate_after_200_steps(beta: float) -> None:
    expected = plain_run(torch.optim.AdamW, "float32", beta, **OPTIONS)
    bag, optimizer, guard = build(AdamW, beta=beta, **OPTIONS)
    assert guard.one_pass
    seen: list[Any] = []
    guard.observers.append(lambda position, proposal, c: seen.append((position, c.min().item(), c.max().item())))
    train(optimizer, bag, guard, 1, 200)
    assert guard.step_nbytes == 0
    assert len(guard.gate.average.tensors) == (len(bag.weights) if beta else 0)  # CPL keeps no average
    assert len(seen) == 200 * len(bag.weights)
    assert all(0.0 <= low <= high <= 1.0 for _, low, high in seen)
    for p, q in zip(bag.weights, expected.weights, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, SGD])
@pytest.mark.usefixtures("compiling")
def test_the_compiled_hook_equals_the_plain_one(kind: type[Optimizer]) -> None:
    expected = plain_run(kind, "float32", 0.9, **OPTIONS)
    bag, optimizer, guard = build(kind, **OPTIONS)
    assert guard.gating.compiled
    assert not guard.one_pass
    train(optimizer, bag, guard, 1, 200)
    for p, q in zip(bag.weights, expected.weights, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


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
            error = (kernels.read(small.average.tensors[0]) - exact.average.tensors[0]).abs().max()
        assert float(error) <= half_step / (1 - 0.9) + 1e-6
    assert small.nbytes == 500 * (1 if kind == "uint8" else 2)


def test_packed_evidence_changes_nothing() -> None:
    whole, packed = Collaborative(beta=0.9), Collaborative(beta=0.9)
    for t in range(20):
        step = proposals(t)
        signs = [Proposal(theta=p.theta, proposed=p.proposed, g_hat=Signs.of(p.g_hat)) for p in step]
        for a, b in zip(whole.coefficients(step), packed.coefficients(signs), strict=True):
            assert torch.equal(a, b)


def test_a_step_counts_once_beside_torchs_own_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WORTH_COMPILING", 10**12)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # from now on torch puts hook calls around its own step
    bag, optimizer, guard = build(AdamW, **OPTIONS)
    train(optimizer, bag, guard, 1, 3)
    assert (guard.steps, guard.gate.average.step) == (3, 3)


def test_a_lone_infinity_stops_the_step_before_it_moves_anything(compiling: None) -> None:
    bag, optimizer, guard = build(AdamW, **OPTIONS)
    train(optimizer, bag, guard, 1, 3)
    for p in bag.weights:
        p.grad = torch.full_like(p, 0.5)
    bag.weights[-1].grad.view(-1)[-1] = float("inf")
    before = [p.detach().clone() for p in [*bag.weights, *(optimizer.state[p]["exp_avg"] for p in bag.weights)]]
    with pytest.raises(FloatingPointError, match="is not finite at step 4"):
        optimizer.step()
    after = [*bag.weights, *(optimizer.state[p]["exp_avg"] for p in bag.weights)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
