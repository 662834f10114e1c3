"""Updates that pass by the gate: each way is gated, refused or warned about."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quadratic import Bag, PastEvidence, new_gradient
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from trained import ANCHORS, trainer
from transformers import TrainerCallback

import cplus
from cplus.core.gates import Collaborative
from cplus.core.guard import Guard
from cplus.integrations.transformers import preserve


def step(bag: Bag, optimizer: Any, batch: int = 0) -> None:
    for p, g in zip(bag.weights, new_gradient([p.detach() for p in bag.weights], batch), strict=True):
        p.grad = g
    optimizer.step()


def guarded(optimizer: Optimizer, bag: Bag) -> Guard:
    return Guard(optimizer, bag, evidence=PastEvidence(), gate=Collaborative(beta=0.9))


class Lookahead:
    """A wrapper that moves the weights itself after the inner step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            for group in self.optimizer.param_groups:
                torch._foreach_mul_(group["params"], 0.99)


class SharpnessAware(SGD):
    """Steps in two halves under names of its own."""

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            torch._foreach_add_(group["params"], [p.grad for p in group["params"]], alpha=-0.1)

    def step(self, closure: Any = None) -> None:
        self.first_step()


def patched(optimizer: Optimizer) -> Optimizer:
    optimizer.step = SharpnessAware.first_step.__get__(optimizer)  # type: ignore[method-assign]
    return optimizer


def hooked(optimizer: Optimizer) -> Optimizer:
    optimizer.register_step_post_hook(lambda *_: Lookahead(SGD(optimizer.param_groups[0]["params"], lr=0.0)).step())
    return optimizer


class FirstStep:
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        SharpnessAware.first_step(self.optimizer)  # type: ignore[arg-type]


WAYS: dict[str, Callable[[Optimizer], Any]] = {
    "a wrapper that writes weights": Lookahead,
    "a step under another name": FirstStep,
    "a patched step": patched,
    "a later hook that writes weights": hooked,
    "another optimizer": lambda optimizer: SGD(optimizer.param_groups[0]["params"], lr=0.1),
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_moved_past_the_gate_are_reported_at_the_next_refresh(way: str) -> None:
    bag = Bag(torch.float32)
    optimizer = SGD(bag.weights, lr=0.1)
    guard = guarded(optimizer, bag)
    guard.refresh()
    step(bag, WAYS[way](optimizer))
    with pytest.warns(UserWarning, match="parameters have changed since the last gated step"):
        guard.refresh()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_protected_optimizer_is_not_copied_and_a_plain_one_is(way: Callable[[Any], Any]) -> None:
    bag = Bag(torch.float32)
    optimizer = SGD(bag.weights, lr=0.1)
    guard = guarded(optimizer, bag)
    with pytest.raises(TypeError, match=r"a protected optimizer cannot be copied or pickled, because the copy's steps"):
        way(optimizer)
    guard.detach()
    way(optimizer)


def test_gated_steps_and_refreshes_alone_raise_no_warning() -> None:
    bag = Bag(torch.float32)
    optimizer = AdamW(bag.weights, lr=0.1)
    guard = guarded(optimizer, bag)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in range(6):
            if batch % 2 == 0:
                guard.refresh()
            step(bag, optimizer, batch)
    assert guard.steps == 6


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_pre_optimizer_step"])
def test_a_callback_that_replaces_the_trainers_optimizer_is_refused(event: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=1)
    preserve(run, anchors=ANCHORS)

    def replace(*_: Any, **__: Any) -> None:
        run.optimizer = SGD(run.model.parameters(), lr=0.1)

    run.add_callback(type("Replacing", (TrainerCallback,), {event: replace})())
    with pytest.raises(RuntimeError, match="optimizer was replaced after training began"):
        run.train()


class Overridden(cplus.core.optim.AdamW):
    """A subclass that forgets the gated kernel."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-0.1)


def test_our_optimizer_refuses_a_step_that_did_not_run_its_gated_kernel(compiling: None) -> None:
    bag = Bag(torch.float32)
    optimizer = Overridden(bag.weights, lr=0.1)
    guard = guarded(optimizer, bag)
    guard.refresh()
    with pytest.raises(RuntimeError, match=r"did not run the gated kernel of cplus\.optim\.AdamW"):
        step(bag, optimizer)
    assert guard.steps == 0


def test_a_second_guard_on_one_optimizer_is_refused_until_the_first_is_detached() -> None:
    bag = Bag(torch.float32)
    optimizer = SGD(bag.weights, lr=0.1)
    first = guarded(optimizer, bag)
    with pytest.raises(ValueError, match="already protected"):
        guarded(optimizer, bag)
    first.detach()
    guarded(optimizer, bag)


def test_a_model_converted_after_protect_is_refused() -> None:
    bag = Bag(torch.float32)
    optimizer = SGD(bag.weights, lr=0.1)
    guard = guarded(optimizer, bag)
    guard.refresh()
    bag.bfloat16()
    with pytest.raises(ValueError, match=r"precision changed after protect\(\)"):
        step(bag, optimizer)


def test_protect_names_trainable_parameters_that_this_optimizer_lacks() -> None:
    bag = Bag(torch.float32)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return sum((p.square().sum() for p in bag.weights), torch.zeros(())) * batch.sum()

    evidence = [(1.0, [torch.ones(1)], loss)]
    with pytest.warns(UserWarning, match=r"1 trainable parameters of the model, such as weights\.2, are not in this"):
        cplus.protect(SGD(bag.weights[:2], lr=0.1), bag, evidence=evidence)
    bag.weights[2].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cplus.protect(SGD(bag.weights[:2], lr=0.1), bag, evidence=evidence)
