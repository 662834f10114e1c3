"""Every way to take a step is gated alike: with and without a closure, whichever parameters have gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, product
from typing import Any

import numpy as np
import oracle
import pytest
import test_attach
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quadratic import Bag, PastEvidence, copies, new_gradient, past_gradient, proposing, same, targets
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from cplus.core import algorithm, kernels, optim
from cplus.core.evidence import Reference
from cplus.core.gates import Collaborative, Elementwise, cautious, largest_momenta
from cplus.core.guard import Guard
from cplus.methods.variants import agem

STEPS, EPOCH = 12, 6
Make = Callable[[list[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, tuple[Make, Callable[[], oracle.Optimizer | oracle.LBFGS]]] = {
    **test_attach.OPTIMIZERS,
    "cplus-adamw": (lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1), lambda: oracle.adam(0.01, decoupled=0.1)),
    "lbfgs": (lambda p: LBFGS(p, lr=0.3, max_iter=3, max_eval=99, history_size=2), lambda: oracle.LBFGS(0.3, 3, 2)),
}


def closure_of(bag: Bag, batch: int, before: Callable[[], None] = lambda: None) -> Callable[[], Tensor]:
    """The loss whose gradient is `quadratic.new_gradient`, by autograd."""

    def closure() -> Tensor:
        before()
        pairs = zip(bag.weights, targets(100 + batch, bag.weights[0].dtype), strict=True)
        loss = torch.stack([0.5 * (p - goal).square().sum() for p, goal in pairs]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


def step_plain(bag: Bag, optimizer: Optimizer, batch: int) -> None:
    optimizer.zero_grad()
    closure_of(bag, batch)()
    optimizer.step()


def step_cleared_outside(bag: Bag, optimizer: Optimizer, batch: int) -> None:
    optimizer.zero_grad()
    optimizer.step(closure_of(bag, batch))  # type: ignore[arg-type]


def step_cleared_inside(bag: Bag, optimizer: Optimizer, batch: int) -> None:
    optimizer.step(closure_of(bag, batch, optimizer.zero_grad))  # type: ignore[arg-type]


def step_by_keyword(bag: Bag, optimizer: Optimizer, batch: int) -> None:
    optimizer.step(closure=closure_of(bag, batch, optimizer.zero_grad))  # type: ignore[arg-type]


CALLS = (step_plain, step_cleared_outside, step_cleared_inside, step_by_keyword)


# LBFGS evaluates a closure several times, so it needs one that clears the gradients.
@pytest.mark.parametrize(
    ("name", "call"), [(name, call) for name in OPTIMIZERS for call in CALLS[2 if name == "lbfgs" else 0 :]]
)
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_every_optimizer_and_every_call_equals_the_oracle(
    name: str, beta: float, call: Callable[[Bag, Optimizer, int], None]
) -> None:
    make, reference = OPTIMIZERS[name]
    bag = Bag(torch.float64)
    optimizer = make(list(bag.weights))
    guard = Guard(optimizer, bag, evidence=PastEvidence(), gate=Collaborative(beta=beta))

    def gradient(theta: Sequence[np.ndarray], t: int | None = None) -> list[np.ndarray]:
        tensors = [torch.from_numpy(p) for p in theta]
        return [g.numpy() for g in (past_gradient(tensors) if t is None else new_gradient(tensors, t))]

    start = [p.numpy() for p in copies(bag.weights)]
    expected = oracle.gated_steps(start, reference(), gradient, gradient, steps=STEPS, refresh_every=EPOCH, beta=beta)

    def compare(batch: int) -> None:
        for p, q in zip(bag.weights, expected[batch - 1], strict=True):
            np.testing.assert_allclose(p.detach().numpy(), q, rtol=1e-9, atol=1e-12)

    train(bag, optimizer, guard, call, compare)


def train(
    bag: Bag, optimizer: Optimizer, guard: Guard, call: Any, after: Callable[[int], None] = lambda batch: None
) -> None:
    """All steps, each taken by the call; the evidence is refreshed once an epoch."""
    for batch in range(1, STEPS + 1):
        if (batch - 1) % EPOCH == 0:
            guard.refresh()
        call(bag, optimizer, batch)
        after(batch)
    assert guard.steps == STEPS


WAYS: dict[str, tuple[type[AdamW], int]] = {
    "plain": (AdamW, 10**12),
    "compiled": (AdamW, 0),
    "one-pass": (optim.AdamW, 0),
}


def built(way: str, beta: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Bag, AdamW, Guard]:
    """A guard that applies the gate in one of the three ways, whatever the model's size."""
    kind, worth = WAYS[way]
    if not worth and not kernels.can_compile("cpu"):
        pytest.skip("no C++ compiler on this machine")
    monkeypatch.setattr(kernels, "WORTH_COMPILING", worth)
    bag = Bag(torch.float32)
    options = {"lr": 0.01, "weight_decay": 0.1} | ({} if kind is optim.AdamW else {"fused": True})
    optimizer = kind(bag.weights, **options)  # type: ignore[arg-type]
    guard = Guard(optimizer, bag, evidence=PastEvidence(), gate=Collaborative(beta=beta))
    assert (guard.gating.compiled, guard.one_pass) == (way != "plain", way == "one-pass")
    return bag, optimizer, guard


@pytest.mark.parametrize(("way", "beta"), [*product(WAYS, (0.0, 0.9)), ("projection", None)])
def test_a_closure_changes_no_bit(way: str, beta: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for call in CALLS:
        if beta is None:  # it acts on the gradient of every evaluation
            bag = Bag(torch.float32)
            optimizer: Optimizer = SGD(bag.weights, lr=0.05, momentum=0.9)
            guard = Guard(optimizer, bag, evidence=PastEvidence(), projection=lambda g, vectors: agem(g, vectors[0]))
        else:
            bag, optimizer, guard = built(way, beta, monkeypatch)
        train(bag, optimizer, guard, call)
        assert guard.gate is None or guard.state_dict()["gate"]["step"] == STEPS
        ends.append(copies(bag.weights))
    assert all(same(end, ends[0]) for end in ends)
    plain = Bag(torch.float32)
    optimizer = SGD(plain.weights, lr=0.05, momentum=0.9)
    for batch in range(1, STEPS + 1):
        step_plain(plain, optimizer, batch)
    assert beta is not None or not same(plain.weights, ends[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["raises", "not finite"])
def test_a_closure_that_fails_leaves_everything_as_it_was(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bag, optimizer, guard = built(way, 0.9, monkeypatch)
    guard.refresh()
    for batch in (1, 2, 3):
        step_cleared_inside(bag, optimizer, batch)
    start, kept = copies(bag.weights), guard.state_dict()

    def raises() -> Tensor:
        raise KeyError("no such row")

    def not_finite() -> Tensor:
        loss = closure_of(bag, 4, optimizer.zero_grad)()
        assert bag.weights[1].grad is not None
        bag.weights[1].grad[0] = float("nan")
        return loss

    wrong, error = {"raises": (raises, KeyError), "not finite": (not_finite, FloatingPointError)}[kind]
    with pytest.raises(error) as found:
        optimizer.step(wrong)  # type: ignore[arg-type]
    assert "the closure of step 4; the parameters are unchanged" in found.value.__notes__[0]
    assert same(bag.weights, start)
    assert guard.state_dict()["gate"]["step"] == kept["gate"]["step"] == guard.steps == 3
    assert same(guard.state_dict()["gate"]["ema"], kept["gate"]["ema"])
    step_plain(bag, optimizer, 4)
    assert guard.steps == 4


def test_a_line_search_that_fails_half_way_is_undone() -> None:
    bag = Bag(torch.float32)
    optimizer = LBFGS(bag.weights, lr=0.3, max_iter=5)
    guard = Guard(optimizer, bag, evidence=PastEvidence(), gate=Collaborative(beta=0.9))
    guard.refresh()
    start, calls = copies(bag.weights), count(1)

    def closure() -> Tensor:
        if next(calls) == 3:
            assert not same(bag.weights, start)
            raise RuntimeError("out of memory")
        return closure_of(bag, 1, optimizer.zero_grad)()

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure)
    assert (same(bag.weights, start), guard.steps) == (True, 0)


Pattern = tuple[bool, bool, bool]
PATTERNS = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=16)


def set_some(bag: Bag, batch: int, pattern: Pattern) -> None:
    for p, g, given_one in zip(bag.weights, new_gradient(copies(bag.weights), batch), pattern, strict=True):
        p.grad = g if given_one else None


def by_the_algorithm(patterns: Sequence[Pattern], beta: float) -> list[Tensor]:
    """`algorithm.run` with torch's AdamW; a call without any gradient proposes nothing and is no step."""
    twin = Bag(torch.float32)
    plain = AdamW(twin.weights, lr=0.01, weight_decay=0.1, fused=True)

    def step(batch: int) -> None:
        set_some(twin, batch, patterns[batch])
        plain.step()

    steps = [batch for batch, pattern in enumerate(patterns) if any(pattern)]
    return by_run(twin, step, steps, beta)


def by_run(twin: Bag, step: Callable[[int], None], batches: Sequence[int], beta: float) -> list[Tensor]:
    """Where `algorithm.run` leads with these plain steps."""
    past = {"anchor_gradient": past_gradient, "probe_gradient": past_gradient}
    start, propose = copies(twin.weights), proposing(list(twin.weights), step)
    return algorithm.run(start, epochs=[batches], propose=propose, beta=beta, **past)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(patterns=PATTERNS, beta=st.sampled_from([0.0, 0.5, 0.9]))
def test_whichever_parameters_have_gradients_all_ways_give_the_same_numbers(
    way: str, patterns: list[Pattern], beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bag, optimizer, guard = built(way, beta, monkeypatch)
    guard.refresh()
    for batch, pattern in enumerate(patterns):
        set_some(bag, batch, pattern)
        optimizer.step()
    assert guard.steps == sum(map(any, patterns))
    for p, q in zip(bag.weights, by_the_algorithm(patterns, beta), strict=True):
        if way == "plain":
            assert torch.equal(p.detach(), q)
        else:
            torch.testing.assert_close(p.detach(), q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_coordinate_that_waited_for_its_gradient_is_not_held_back(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Eleven steps without a gradient are eleven masks of 1; the twelfth conflicts, and 1 - 0.1 / (1 - 0.9**12) is left.
    bag, optimizer, guard = built(way, 0.9, monkeypatch)
    guard.refresh()
    for batch in range(11):
        set_some(bag, batch, (True, False, True))
        optimizer.step()
    before, sign = bag.weights[1].detach().clone(), guard.gating.evidence_at(1).sign().float()
    optimizer.zero_grad()
    bag.weights[1].grad = -sign  # AdamW's first step is the rate times this sign: against the past everywhere
    optimizer.step()
    delta = 0.01 * sign - 0.01 * 0.1 * before
    c = 1 - 0.1 / (1 - 0.9**12)
    torch.testing.assert_close(bag.weights[1].detach() - before, c * delta, rtol=1e-4, atol=1e-6)


class Stray(SGD):
    """Its step also moves a parameter it does not list."""

    other: nn.Parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.other.add_(1.0)


class Chosen(PastEvidence):
    """The evidence of some of the bag's parameters."""

    def __init__(self, *positions: int) -> None:
        self.positions = positions

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        whole = past_gradient(copies(Bag(torch.float32).weights))
        return Reference(vectors=[[whole[i] for i in self.positions]])


def test_a_parameter_that_moves_past_the_gate_is_an_error() -> None:
    bag = Bag(torch.float32)
    optimizer = Stray(list(bag.weights)[:2], lr=0.1)
    optimizer.other = bag.weights[2]
    guard = Guard(optimizer, bag, evidence=Chosen(0, 1), gate=Collaborative(beta=0.9))
    guard.refresh()
    start = copies(bag.weights)
    closure_of(bag, 1)()
    with pytest.raises(RuntimeError, match=r"moved 'weights.2', which is not among the parameters it was protected"):
        optimizer.step()
    assert (same(list(bag.weights)[:2], start[:2]), guard.steps) == (True, 0)


class Twice(SGD):
    """A subclass whose step calls its base class's, and then goes on."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.fails:
            raise RuntimeError("half way")
        for p in self.param_groups[0]["params"]:
            p.mul_(0.99)


def test_a_step_inside_a_step_is_one_step() -> None:
    SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # from here on torch hooks SGD's own step too
    bag = Bag(torch.float64)
    optimizer = Twice(bag.weights, lr=0.05)
    guard = Guard(optimizer, bag, evidence=PastEvidence(), gate=Collaborative(beta=0.9))
    guard.refresh()
    twin = Bag(torch.float64)
    plain = Twice(twin.weights, lr=0.05)
    expected = by_run(twin, lambda batch: step_plain(twin, plain, batch), [1, 2, 3, 4], 0.9)
    for batch in (1, 2):
        step_plain(bag, optimizer, batch)
    middle = copies(bag.weights)
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="half way"):
        step_plain(bag, optimizer, 3)
    for p, value in zip(bag.weights, middle, strict=True):
        p.data.copy_(value)  # what a user would do who goes on after it
    optimizer.fails = False
    for batch in (3, 4):
        step_plain(bag, optimizer, batch)
    assert (same(bag.weights, expected), guard.steps) == (True, 4)


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_parameter_with_a_gradient_is_refused_before_the_step(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, worth = WAYS[way]
    monkeypatch.setattr(kernels, "WORTH_COMPILING", worth)
    bag = Bag(torch.float32)
    bag.weights[1].requires_grad_(False)
    optimizer = kind(bag.weights, lr=0.01)
    guard = Guard(optimizer, bag, evidence=Chosen(0, 2), gate=Collaborative(beta=0.9))
    guard.refresh()
    start = copies(bag.weights)
    set_some(bag, 1, (True, True, True))
    with pytest.raises(RuntimeError, match=r"'weights.1' does not require a gradient but has one"):
        optimizer.step()
    assert same(bag.weights, start)


def test_a_gate_that_reads_no_evidence_needs_none() -> None:
    bag = Bag(torch.float32)
    optimizer = AdamW(bag.weights, lr=0.01, weight_decay=0.0)
    guard = Guard(optimizer, bag, gate=Elementwise(cautious, uses="nothing", whole=False))
    with pytest.raises(ValueError, match="reads no evidence, so there is nothing to refresh"):
        guard.refresh()
    for options in ({"gate": Collaborative(beta=0.9)}, {"projection": lambda g, vectors: None}, {}):
        with pytest.raises(ValueError, match="reads evidence of past behaviour, and none was given"):
            Guard(SGD(bag.weights, lr=0.1), bag, **options)  # type: ignore[arg-type]
    twin = Bag(torch.float32)
    plain = AdamW(twin.weights, lr=0.01, weight_decay=0.0)
    for batch in range(1, 9):
        for p, q in zip(twin.weights, bag.weights, strict=True):
            p.data.copy_(q)
        step_plain(bag, optimizer, batch)
        before = copies(twin.weights)
        step_plain(twin, plain, batch)
        for p, old, q in zip(bag.weights, before, twin.weights, strict=True):
            assert q.grad is not None
            descends = q.grad * (q.detach() - old) <= 0
            assert torch.equal(p.detach(), torch.where(descends, q.detach(), old))
    assert (guard.steps, guard.state_dict()["vectors"]) == (8, [])


@pytest.mark.parametrize(
    ("make", "moment"),
    [
        (lambda p: AdamW(p, lr=0.01), "exp_avg"),
        (lambda p: SGD(p, lr=0.01, momentum=0.9), "momentum_buffer"),
        (lambda p: SGD(p, lr=0.01), None),
    ],
)
def test_the_largest_momenta_are_the_optimizers_own(make: Make, moment: str | None) -> None:
    bag = Bag(torch.float32)
    optimizer = make(list(bag.weights))
    Guard(optimizer, bag, gate=Elementwise(lambda step: largest_momenta(step, 0.25), uses="nothing"))
    for batch in (1, 2, 3):
        before = copies(bag.weights)
        step_plain(bag, optimizer, batch)
        for p, old in zip(bag.weights, before, strict=True):
            assert p.grad is not None
            m = (p.grad if moment is None else optimizer.state[p][moment]).abs()
            moved = (p.detach() != old).flatten().nonzero().flatten().tolist()
            assert moved == sorted(m.flatten().topk(-(-p.numel() // 4)).indices.tolist())
