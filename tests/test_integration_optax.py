"""One set of vectors, worked out in exact fractions, for the torch core, the NumPy oracle and optax."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import torch

from cplus.core import algorithm
from cplus.integrations.optax import blend, collaborative, mask

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
each_case = pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"beta={case['beta']}")


@each_case
def test_the_torch_core_gives_the_golden_vectors(case: dict[str, Any]) -> None:
    theta = [torch.tensor(v) for v in GOLDEN["theta"]]
    ema = [algorithm.zeros(p) for p in theta]
    for t, (step, expected) in enumerate(zip(GOLDEN["steps"], case["expected"], strict=True), start=1):
        for i, p in enumerate(theta):
            proposed = p + torch.tensor(step["update"][i])
            bits = algorithm.collaborates(torch.tensor(step["g_hat"][i]), torch.tensor(step["update"][i]))
            assert bits.tolist() == expected["mask"][i]
            ema[i] = algorithm.smooth(ema[i], bits, case["beta"])
            c = algorithm.coefficient(ema[i], case["beta"], t)
            torch.testing.assert_close(c, torch.tensor(expected["coefficient"][i]), rtol=1e-6, atol=1e-6)
            theta[i] = algorithm.apply(p, proposed, c)
            torch.testing.assert_close(theta[i], torch.tensor(expected["theta"][i]), rtol=1e-6, atol=1e-6)


@each_case
def test_the_oracle_gives_the_golden_vectors(case: dict[str, Any]) -> None:
    steps = GOLDEN["steps"]
    counter = iter(steps)
    found = oracle.gated_steps(
        [np.array(v) for v in GOLDEN["theta"]],
        oracle.Optimizer(lambda p, g, t, state: p + g),
        lambda theta, t: [np.array(v) for v in steps[t - 1]["update"]],
        lambda theta: [np.array(v) for v in next(counter)["g_hat"]],
        steps=len(steps),
        refresh_every=1,
        beta=case["beta"],
    )
    for theta, expected in zip(found, case["expected"], strict=True):
        for p, e in zip(theta, expected["theta"], strict=True):
            np.testing.assert_allclose(p, e, rtol=1e-12, atol=1e-12)


@each_case
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "jit"])
def test_optax_gives_the_golden_vectors(case: dict[str, Any], compiled: bool) -> None:
    gate = collaborative(case["beta"])
    update = jax.jit(gate.update) if compiled else gate.update
    theta = [jnp.array(v) for v in GOLDEN["theta"]]
    state = gate.init(theta)
    for step, expected in zip(GOLDEN["steps"], case["expected"], strict=True):
        raw, g_hat = ([jnp.array(v) for v in step[key]] for key in ("update", "g_hat"))
        for g, u, e in zip(g_hat, raw, expected["mask"], strict=True):
            assert mask(g, u).tolist() == e
        gated, state = update(raw, state, theta, preservation=g_hat)
        theta = optax.apply_updates(theta, gated)
        for i, p in enumerate(theta):
            np.testing.assert_allclose(p, expected["theta"][i], rtol=1e-6, atol=1e-6)
            applied = np.array(expected["coefficient"][i]) * np.array(step["update"][i])
            np.testing.assert_allclose(gated[i], applied, rtol=1e-6, atol=1e-6)


def test_last_in_a_chain_it_gates_decay_and_momentum_as_the_hooks_do() -> None:
    from quadratic import Bag, PastEvidence, new_gradient, past_gradient
    from torch.optim import AdamW

    from cplus.core.gates import Collaborative
    from cplus.core.guard import Guard

    bag = Bag(torch.float32)
    torch_optimizer = AdamW(bag.weights, lr=0.01, weight_decay=0.1)
    guard = Guard(torch_optimizer, bag, evidence=PastEvidence(), gate=Collaborative(beta=0.9))
    theta = [jnp.asarray(p.detach().numpy()) for p in bag.weights]
    optimizer = optax.chain(optax.adamw(0.01, weight_decay=0.1), collaborative(0.9))
    state = optimizer.init(theta)
    for batch in range(1, 25):
        now = [torch.from_numpy(np.array(p)) for p in theta]
        if batch % 6 == 1:
            guard.refresh()
            g_hat = [jnp.asarray(g.numpy()) for g in past_gradient(now)]
        gradient = [jnp.asarray(g.numpy()) for g in new_gradient(now, batch)]
        updates, state = optimizer.update(gradient, state, theta, preservation=g_hat)
        theta = optax.apply_updates(theta, updates)
        for p, g in zip(bag.weights, new_gradient([p.detach() for p in bag.weights], batch), strict=True):
            p.grad = g
        torch_optimizer.step()
    for p, q in zip(theta, bag.weights, strict=True):
        np.testing.assert_allclose(p, q.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_half_precision_updates_keep_their_type_and_a_float32_average() -> None:
    gate = collaborative(0.9)
    theta = {"w": jnp.ones(3, jnp.bfloat16), "frozen": None}
    state = gate.init(theta)
    updates, state = gate.update(
        {"w": jnp.ones(3, jnp.bfloat16), "frozen": None},
        state,
        theta,
        preservation={"w": jnp.array([-1.0, 0.0, 1.0], jnp.bfloat16), "frozen": None},
    )
    assert updates["w"].dtype == jnp.bfloat16
    assert updates["w"].tolist() == [1.0, 1.0, 0.0]
    assert state.ema["w"].dtype == jnp.float32


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"beta must lie in \[0, 1\), got 1.0"):
        collaborative(1.0)
    with pytest.raises(ValueError, match=r"anchor_weight must lie in \[0, 1\], got -1"):
        blend(jnp.ones(1), jnp.ones(1), -1)
    assert blend(jnp.array([4.0]), jnp.array([-2.0])).tolist() == [1.0]
    gate = collaborative(0.9)
    with pytest.raises(ValueError, match=r"pass update\(\.\.\., preservation=g_hat\)"):
        gate.update(jnp.ones(1), gate.init(jnp.ones(1)), jnp.ones(1))


def test_importing_it_needs_no_torch_and_the_rest_needs_no_jax() -> None:
    alone = "import sys; sys.modules['torch'] = None; import cplus.integrations.optax; assert 'jax' in sys.modules"
    assert subprocess.run([sys.executable, "-c", alone], check=False).returncode == 0
    light = (
        "import sys, cplus, cplus.cli.app; "
        "sys.exit(bool({'torch', 'jax', 'peft', 'trl', 'accelerate', 'datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", light], check=False).returncode == 0
