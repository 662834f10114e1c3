"""JAX and optax, without torch: a small network learns new labels under the gate.    python examples/optax_loop.py

The past is a task the network was trained on. Eight of its points are anchors, and the network's own answers to random
inputs are its self-probes. Both optimizers stop when they have learned the new points.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cplus.integrations.optax import blend, collaborative

Batch = tuple[jax.Array, jax.Array]
INPUTS, WIDTH, OUTPUTS = 64, 512, 4


def network(theta: Any, x: jax.Array) -> jax.Array:
    """Two layers."""
    return jnp.tanh(x @ theta["in"] + theta["bias"]) @ theta["out"]


def loss(theta: Any, batch: Batch) -> jax.Array:
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(network(theta, batch[0]), batch[1]).mean()


def accuracy(theta: Any, batch: Batch) -> float:
    """The share of right answers."""
    return float((network(theta, batch[0]).argmax(-1) == batch[1]).mean())


def fit(theta: Any, batch: Batch, optimizer: Any, past: Callable[[Any], Any], enough: float) -> Any:
    """Train until the loss is low enough; `past` gives the preservation gradient, taken anew every 25 steps."""
    optimizer = optax.with_extra_args_support(optimizer)
    state = optimizer.init(theta)

    @jax.jit
    def step(theta: Any, state: Any, g_hat: Any) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(theta, batch)
        updates, state = optimizer.update(gradient, state, theta, preservation=g_hat)
        return optax.apply_updates(theta, updates), state, value

    for number in range(2000):
        if number % 25 == 0:
            g_hat = past(theta)
        theta, state, value = step(theta, state, g_hat)
        if value < enough:
            break
    return theta


def main() -> dict[str, float]:
    """Compare the plain optimizer with the gated one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    keys = jax.random.split(jax.random.key(parser.parse_args().seed), 6)
    theta = {
        "in": jax.random.normal(keys[0], (INPUTS, WIDTH)) / INPUTS**0.5,
        "bias": jnp.zeros(WIDTH),
        "out": jax.random.normal(keys[1], (WIDTH, OUTPUTS)) / WIDTH**0.5,
    }
    points = jax.random.normal(keys[3], (512, INPUTS))
    answers = (points @ jax.random.normal(keys[2], (INPUTS, OUTPUTS))).argmax(-1)
    theta = fit(theta, (points, answers), optax.adamw(1e-2), lambda now: None, enough=1e-4)
    anchors, known = (points[:8], answers[:8]), (points[8:], answers[8:])
    asked = jax.random.normal(keys[5], (256, INPUTS))
    probes = (asked, network(theta, asked).argmax(-1))
    news = jax.random.normal(keys[4], (24, INPUTS)) + 0.5
    new = (news, (network(theta, news).argmax(-1) + 1) % OUTPUTS)  # none of these is known yet

    gradient = jax.jit(jax.grad(loss))
    found = {"kept before": accuracy(theta, known)}
    optimizers = {
        "plain": optax.adamw(1e-3),
        "gated": optax.chain(optax.adamw(1e-3), collaborative(0.9)),  # the gate comes last
    }
    for name, optimizer in optimizers.items():
        after = fit(theta, new, optimizer, lambda now: blend(gradient(now, anchors), gradient(now, probes)), enough=0.1)
        found |= {f"learned {name}": accuracy(after, new), f"kept {name}": accuracy(after, known)}
    print({name: round(value, 3) for name, value in found.items()})
    return found


if __name__ == "__main__":
    main()
