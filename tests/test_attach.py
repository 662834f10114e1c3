"""The gate on torch optimizers: parity with the plain loop and the oracle, exact ends, state, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from quadratic import Bag, ConstantEvidence, PastEvidence, new_gradient, past_gradient
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils._pytree import tree_leaves

from cplus.core import algorithm, kernels, optim
from cplus.core.evidence import Reference
from cplus.core.gates import Collaborative, Elementwise, Proposal, Shuffled, stored
from cplus.core.guard import Guard, protect
from cplus.core.rows import Encoded
from cplus.methods.variants import Remembered, agem

Make = Callable[[list[nn.Parameter]], Optimizer]
EPS = float(np.finfo(np.float64).eps)

OPTIMIZERS: dict[str, tuple[Make, Callable[[], oracle.Optimizer]]] = {
    "sgd": (lambda p: SGD(p, lr=0.05), lambda: oracle.sgd(0.05)),
    "sgd-decay": (lambda p: SGD(p, lr=0.05, weight_decay=0.1), lambda: oracle.sgd(0.05, weight_decay=0.1)),
    "momentum": (lambda p: SGD(p, lr=0.05, momentum=0.9), lambda: oracle.sgd(0.05, 0.9)),
    "nesterov": (lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True), lambda: oracle.sgd(0.05, 0.9, nesterov=True)),
    "adam": (lambda p: Adam(p, lr=0.01), lambda: oracle.adam(0.01)),
    "adamw": (
        lambda p: AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
        lambda: oracle.adam(0.01, decoupled=0.1),
    ),
    "adamw-foreach": (
        lambda p: AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
        lambda: oracle.adam(0.01, decoupled=0.1),
    ),
    "adamw-fused": (
        lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
        lambda: oracle.adam(0.01, decoupled=0.1),
    ),
    "adagrad": (lambda p: Adagrad(p, lr=0.05), lambda: oracle.adagrad(0.05)),
    "rmsprop": (lambda p: RMSprop(p, lr=0.01, momentum=0.5), lambda: oracle.rmsprop(0.01, momentum=0.5)),
    "adafactor": (lambda p: Adafactor(p, lr=0.05), lambda: oracle.adafactor(0.05, (EPS, 1e-3))),
}
STEPS, EPOCH = 24, 6
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


class Halves(PastEvidence):
    """Evidence that is coefficients."""

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        return Reference(vectors=[[torch.full_like(p.detach(), 0.5, dtype=torch.bfloat16) for p in params]])


def set_gradients(bag: Bag, batch: int) -> None:
    for p, g in zip(bag.weights, new_gradient([p.detach() for p in bag.weights], batch), strict=True):
        p.grad = g


def guarded(make: Make, *, beta: float, dtype: torch.dtype = torch.float32) -> tuple[Bag, Optimizer, Guard]:
    bag = Bag(dtype)
    optimizer = make(list(bag.weights))
    return bag, optimizer, Guard(optimizer, bag, evidence=PastEvidence(), gate=Collaborative(beta=beta))


def train(bag: Bag, optimizer: Optimizer, guard: Guard, first: int = 1, last: int = STEPS) -> None:
    for batch in range(first, last + 1):
        if (batch - 1) % EPOCH == 0:
            guard.refresh()
        set_gradients(bag, batch)
        optimizer.step()


@each_optimizer
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_hooks_equal_the_plain_loop_bitwise(name: str, beta: float) -> None:
    make, _ = OPTIMIZERS[name]
    bag, optimizer, guard = guarded(make, beta=beta)
    twin = Bag(torch.float32)
    plain = make(list(twin.weights))

    def propose(theta: list[torch.Tensor], batch: int) -> list[torch.Tensor]:
        for p, value in zip(twin.weights, theta, strict=True):
            p.data.copy_(value)
        set_gradients(twin, batch)
        plain.step()
        return [p.detach().clone() for p in twin.weights]

    def zero(theta: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros_like(p) for p in theta]

    epochs = [range(first, first + EPOCH) for first in range(1, STEPS + 1, EPOCH)]
    expected = algorithm.run(
        [p.detach() for p in twin.weights],
        epochs=epochs,
        propose=propose,
        anchor_gradient=past_gradient,
        probe_gradient=zero,
        anchor_weight=1.0,
        beta=beta,
    )
    train(bag, optimizer, guard)
    for p, q in zip(bag.weights, expected, strict=True):
        assert torch.equal(p.detach(), q)


@each_optimizer
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_all_conflict_is_bitwise_frozen(name: str, beta: float) -> None:
    make, _ = OPTIMIZERS[name]

    bag, optimizer, guard = guarded(make, beta=beta)
    start = [p.detach().clone() for p in bag.weights]
    for batch in range(1, 9):
        twin = Bag(torch.float32)
        twin_optimizer = make(list(twin.weights))
        twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        set_gradients(twin, batch)
        twin_optimizer.step()
        guard.gating.keep([[p.detach() - s for p, s in zip(twin.weights, start, strict=True)]])
        assert all(bool((g != 0).any()) for g in guard.vectors[0])
        set_gradients(bag, batch)
        optimizer.step()
        for p, s in zip(bag.weights, start, strict=True):
            moved = p.detach() != s
            assert not bool(moved.any())


@each_optimizer
def test_state_saved_and_loaded_mid_run_continues_bitwise(name: str) -> None:
    make, _ = OPTIMIZERS[name]
    bag, optimizer, guard = guarded(make, beta=0.9)
    half = STEPS // 2 + 2  # inside an epoch, so the evidence must come from the kept state
    train(bag, optimizer, guard, 1, half)
    kept = copy.deepcopy((bag.state_dict(), optimizer.state_dict(), guard.state_dict()))
    train(bag, optimizer, guard, half + 1, STEPS)
    other, other_optimizer, other_guard = guarded(make, beta=0.9)
    other.load_state_dict(kept[0])
    other_optimizer.load_state_dict(kept[1])
    other_guard.load_state_dict(kept[2])
    train(other, other_optimizer, other_guard, half + 1, STEPS)
    for p, q in zip(bag.weights, other.weights, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    "how",
    [
        {"gate": Collaborative(beta=0.9)},
        {"gate": Collaborative(beta=0.9, ema="uint8")},
        {"gate": Shuffled(Collaborative(beta=0.9, ema="bfloat16"), seed=0)},
        {"gate": Elementwise(stored, uses="coefficients"), "evidence": Halves()},
        {"gate": Collaborative(beta=0.0), "evidence": Remembered(PastEvidence(), 0.5)},
        {"projection": lambda gradients, vectors: agem(gradients, vectors[0])},
    ],
    ids=["float32", "uint8", "shuffled", "curvature", "remembered", "projection"],
)
def test_a_state_on_the_host_is_restored_on_the_parameters_device(how: dict[str, Any]) -> None:
    def build(device: str) -> tuple[Bag, SGD, Guard]:
        bag = Bag(torch.float32).to(device)
        optimizer = SGD(bag.weights, lr=0.01, momentum=0.9)
        return bag, optimizer, Guard(optimizer, bag, **copy.deepcopy({"evidence": PastEvidence(), **how}))

    def tensors(guard: Guard) -> list[Tensor]:
        state = guard.state_dict()
        generators = tree_leaves((state["gate"] or {}).pop("random", {}))
        assert all(random.is_cpu for random in generators)  # torch restores a generator from the host
        return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]

    bag, optimizer, guard = build("cpu")
    train(bag, optimizer, guard, 1, 2)
    _, _, other = build("meta")
    other.load_state_dict(guard.state_dict())
    assert [t.dtype for t in tensors(other)] == [t.dtype for t in tensors(guard)]
    assert all(t.is_meta for t in tensors(other))


def test_groups_schedulers_accumulation_and_clipping_act_as_without_the_gate() -> None:
    def build() -> tuple[Bag, AdamW, torch.optim.lr_scheduler.LRScheduler]:
        bag = Bag(torch.float32)
        groups = [
            {"params": [bag.weights[0]], "lr": 0.02, "weight_decay": 0.0},
            {"params": list(bag.weights[1:]), "lr": 0.01},
        ]
        optimizer = AdamW(groups, weight_decay=0.1)
        return bag, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

    def step(bag: Bag, optimizer: AdamW, scheduler: torch.optim.lr_scheduler.LRScheduler, batch: int) -> None:
        optimizer.zero_grad()
        for micro in (batch, batch + 50):  # accumulate two micro-batches
            for p, g in zip(bag.weights, new_gradient([p.detach() for p in bag.weights], micro), strict=True):
                p.grad = g if p.grad is None else p.grad + g
        torch.nn.utils.clip_grad_norm_(bag.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    plain, gated = build(), build()
    zero = ConstantEvidence([torch.zeros_like(p) for p in gated[0].weights])
    Guard(gated[1], gated[0], evidence=zero, gate=Collaborative(beta=0.0)).refresh()
    for batch in range(1, STEPS + 1):
        step(*plain, batch)
        step(*gated, batch)
    assert all(torch.equal(p, q) for p, q in zip(plain[0].weights, gated[0].weights, strict=True))
    assert plain[2].get_last_lr() == gated[2].get_last_lr()


def test_missing_gradients_frozen_and_tied_parameters() -> None:
    bag = Bag(torch.float32)
    bag.weights[1].requires_grad_(False)
    tied = nn.Module()
    tied.a, tied.b, tied.bag = bag.weights[0], bag.weights[0], bag  # type: ignore[assignment]
    optimizer = AdamW(tied.parameters(), lr=0.01)
    guard = Guard(optimizer, tied, evidence=PastEvidenceOfFirst(), gate=Collaborative(beta=0.9))
    assert len(guard.params) == 2  # one tied, one frozen
    before = [p.detach().clone() for p in bag.weights]
    guard.refresh()
    bag.weights[0].grad = new_gradient([p.detach() for p in bag.weights], 1)[0]
    optimizer.step()  # weights[2] has no gradient
    assert torch.equal(bag.weights[1], before[1])
    assert torch.equal(bag.weights[2], before[2])
    assert not torch.equal(bag.weights[0], before[0])


class PastEvidenceOfFirst(PastEvidence):
    def __call__(self, params: list[nn.Parameter], refresh: int) -> object:
        return Reference(vectors=[[torch.ones_like(p) for p in params]])


def test_weight_decay_does_not_leak_past_the_gate() -> None:
    # A coordinate in conflict from the first step on stays bitwise, although AdamW would decay it.
    bag = Bag(torch.float32)
    optimizer = AdamW(bag.weights, lr=0.01, weight_decay=0.5)
    evidence = ConstantEvidence([-p.detach().sign() for p in bag.weights])
    guard = Guard(optimizer, bag, evidence=evidence, gate=Collaborative(beta=0.9))
    guard.refresh()
    start = [p.detach().clone() for p in bag.weights]
    for _ in range(5):
        for p in bag.weights:
            p.grad = torch.zeros_like(p)  # the proposal is decay alone, and the past wants larger weights
        optimizer.step()
    assert all(torch.equal(p, s) for p, s in zip(bag.weights, start, strict=True))


def test_protect_refuses_what_it_cannot_serve() -> None:
    bag = Bag(torch.float32)
    rows = [Encoded((1,), (2,))]
    with pytest.raises(TypeError, match=r"needs a torch.optim.Optimizer, got str"):
        protect("adamw", bag, anchors=rows)  # type: ignore[arg-type]
    optimizer = AdamW(bag.weights)
    with pytest.raises(ValueError, match="got neither"):
        protect(optimizer, bag)
    with pytest.raises(ValueError, match=r"anchor_weight must lie in \[0, 1\], got 1.2"):
        protect(optimizer, bag, anchors=rows, anchor_weight=1.2)
    with pytest.raises(ValueError, match=r"beta must lie in \[0, 1\), got 1.0"):
        protect(optimizer, bag, anchors=rows, beta=1.0)
    with pytest.raises(ValueError, match="refresh_every must be at least 1"):
        protect(optimizer, bag, anchors=rows, refresh_every=0)
    assert not optimizer._optimizer_step_pre_hooks  # nothing was attached by the refused calls
    half = Bag(torch.bfloat16)
    with pytest.raises(TypeError, match=r"'weights.0' is bfloat16: steps below one ulp"):
        protect(AdamW(half.weights), half, anchors=rows)
    assert protect(AdamW(half.weights), half, anchors=rows, allow_16bit=True).params
    kind = type("AdamWScheduleFree", (SGD,), {"__module__": "schedulefree.adamw_schedulefree"})
    with pytest.raises(TypeError, match="second iterate"):
        Guard(kind(bag.weights, lr=0.1), bag, evidence=PastEvidence())


def test_a_guard_refuses_a_step_too_early_other_parameters_and_other_states() -> None:
    bag, optimizer, guard = guarded(lambda p: SGD(p, lr=0.01), beta=0.9)
    start = [p.detach().clone() for p in bag.weights]
    set_gradients(bag, 1)
    with pytest.raises(RuntimeError, match=r"call guard.refresh\(\) before the first step"):
        optimizer.step()
    assert all(torch.equal(p, s) for p, s in zip(bag.weights, start, strict=True))
    guard.refresh()
    state = guard.state_dict()
    state["vectors"][0][0] = torch.zeros(9)
    with pytest.raises(ValueError, match="belongs to other parameters"):
        guard.load_state_dict(state)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="parameters changed after protect"):
        optimizer.step()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(value: float) -> None:
    bag, optimizer, guard = guarded(lambda p: AdamW(p, lr=0.01), beta=0.9)
    train(bag, optimizer, guard, 1, 2)
    start = [p.detach().clone() for p in bag.weights]
    set_gradients(bag, 3)
    assert bag.weights[1].grad is not None
    bag.weights[1].grad[2] = value
    with pytest.raises(FloatingPointError, match=r"gradient of weights.1 is not finite at step 3"):
        optimizer.step()
    assert all(torch.equal(p, s) for p, s in zip(bag.weights, start, strict=True))


def test_huge_but_finite_gradients_pass() -> None:
    bag, optimizer, guard = guarded(lambda p: SGD(p, lr=1e-38), beta=0.9)
    guard.gating.keep([[torch.zeros_like(p) for p in bag.weights]])
    start = [p.detach().clone() for p in bag.weights]
    for p in bag.weights:
        p.grad = torch.full_like(p, 3e38)  # the sum that is checked first overflows
        assert bool(p.grad.sum().isinf())
    optimizer.step()
    assert guard.steps == 1
    for p, s in zip(bag.weights, start, strict=True):
        torch.testing.assert_close(p.detach(), s - 3.0, rtol=1e-5, atol=1e-5)


def test_the_evidence_is_kept_whole_or_by_its_signs() -> None:
    bag = Bag(torch.float32)
    expected = past_gradient([p.detach() for p in bag.weights])
    gate = Collaborative(beta=0.9)
    for seen, projection, whole in ((None, None, True), (gate, None, False), (gate, first_vector, True)):
        optimizer = SGD(bag.weights, lr=0.01)
        guard = Guard(optimizer, bag, evidence=PastEvidence(), gate=seen, projection=projection)
        guard.refresh()
        for i, g in enumerate(expected):
            assert torch.equal(guard.gating.evidence_at(i).float(), g if whole else g.sign())


def test_a_guard_refreshes_by_steps_and_ends_with_its_block() -> None:
    bag = Bag(torch.float32)
    optimizer = SGD(bag.weights, lr=0.01)
    with Guard(optimizer, bag, evidence=PastEvidence(), gate=Collaborative(beta=0.9), refresh_every=4) as guard:
        assert optimizer._optimizer_step_pre_hooks
        assert optimizer._optimizer_step_post_hooks
        for batch in range(1, 10):
            set_gradients(bag, batch)
            optimizer.step()
    assert (guard.refreshes, guard.steps) == (3, 9)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def first_vector(gradients: Sequence[Tensor], vectors: Sequence[Sequence[Tensor]]) -> None:
    agem(gradients, vectors[0])


def test_a_projection_acts_on_the_gradient_and_a_guard_without_a_gate_on_nothing_else() -> None:
    bag = Bag(torch.float32)
    optimizer = SGD(bag.weights, lr=0.1)
    guard = Guard(optimizer, bag, evidence=PastEvidence(), projection=first_vector)
    start = [p.detach().clone() for p in bag.weights]
    guard.refresh()
    used = (0, 2)  # weights[1] has no gradient in this step, so its evidence takes no part either
    r = torch.cat([past_gradient(start)[i].flatten() for i in used]).double()
    g = torch.cat([new_gradient(start, 1)[i].flatten() for i in used]).double() - 2.0 * r
    assert g @ r < 0
    for i, part in zip(used, g.split([start[i].numel() for i in used]), strict=True):
        bag.weights[i].grad = part.view_as(start[i]).float()
    optimizer.step()
    moved = torch.cat([(start[i] - bag.weights[i].detach()).flatten() for i in used]).double()
    torch.testing.assert_close(moved, 0.1 * (g - (g @ r) / (r @ r) * r), rtol=1e-5, atol=1e-6)
    assert torch.equal(bag.weights[1], start[1])
    assert guard.steps == 1
    assert (guard.nbytes, guard.step_nbytes) == (4 * sum(p.numel() for p in bag.weights), 0)


WAYS: dict[str, tuple[type[Optimizer], int]] = {
    "plain": (AdamW, 10**12),
    "compiled": (AdamW, 0),
    "one-pass": (optim.AdamW, 0),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the three ways the gate is applied, whatever the model's size."""
    worth = WAYS[request.param][1]
    if not worth and not kernels.can_compile("cpu"):
        pytest.skip("no C++ compiler for Inductor on this machine")
    monkeypatch.setattr(kernels, "WORTH_COMPILING", worth)
    return str(request.param)


def test_an_observer_is_shown_what_is_applied(way: str) -> None:
    bag, optimizer, guard = guarded(lambda p: WAYS[way][0](p, lr=0.01, weight_decay=0.1), beta=0.9)
    assert (guard.gating.compiled, guard.one_pass) == (way != "plain", way == "one-pass")
    seen: list[tuple[int, Proposal, Tensor]] = []

    def observe(i: int, proposal: Proposal, c: Tensor) -> None:
        kept = Proposal(proposal.theta.clone(), proposal.proposed.clone(), proposal.sign.clone())
        seen.append((i, kept, c.clone()))

    guard.observers.append(observe)
    for batch in (1, 2, 3):
        before = [p.detach().clone() for p in bag.weights]
        seen.clear()
        train(bag, optimizer, guard, batch, batch)
        assert [i for i, _, _ in seen] == [0, 1, 2]
        for i, proposal, c in seen:
            assert torch.equal(proposal.theta, before[i])
            assert torch.equal(proposal.sign.float(), guard.vectors[0][i].float())
            applied = algorithm.apply(proposal.theta, proposal.proposed, c)
            torch.testing.assert_close(bag.weights[i].detach(), applied, rtol=1e-6, atol=1e-7)
    assert any(bool(((c > 0) & (c < 1)).any()) for _, _, c in seen)  # the smoothed coefficient, not the mask


def test_a_step_at_rate_zero_counts_for_nothing_with_and_without_evidence(way: str) -> None:
    bag, optimizer, guard = guarded(lambda p: WAYS[way][0](p, lr=0.0, weight_decay=0.1), beta=0.9)
    start = [p.detach().clone() for p in bag.weights]
    assert guard.gate is not None
    for refreshed in (False, True):  # torch.distributed.checkpoint steps to create the state
        if refreshed:
            guard.refresh()
        set_gradients(bag, 1)
        optimizer.step()
        assert all("exp_avg" in optimizer.state[p] for p in bag.weights)
        assert (guard.steps, guard.gate.state_dict()["step"]) == (0, 0)
        assert all(torch.equal(p, s) for p, s in zip(bag.weights, start, strict=True))
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    assert (guard.steps, guard.gate.state_dict()["step"]) == (1, 1)
    assert not all(torch.equal(p, s) for p, s in zip(bag.weights, start, strict=True))


class Restless(SGD):
    """It moves whatever its learning rate."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(1.0)


def test_moving_at_learning_rate_zero_without_evidence_is_taken_back() -> None:
    bag, optimizer, guard = guarded(lambda p: Restless(p, lr=0.0), beta=0.9)
    start = [p.detach().clone() for p in bag.weights]
    set_gradients(bag, 1)
    with pytest.raises(RuntimeError, match=r"at learning rate 0; call guard.refresh\(\) before the first step"):
        optimizer.step()
    assert all(torch.equal(p, s) for p, s in zip(bag.weights, start, strict=True))
    assert guard.steps == 0
