"""JAX and optax, without torch: a small network learns new labels under the gate.    python examples/optax_loop.py

The past is a task the network was trained on. Eight of its points are anchors, and the network's own answers to random
inputs are its self-probes.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cplus.integrations.optax import blend, collaborative


def network(theta: Any, x: jax.Array) -> jax.Array:
    """Two layers."""
    return jnp.tanh(x @ theta["in"] + theta["bias"]) @ theta["out"]


def loss(theta: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(network(theta, batch[0]), batch[1]).mean()


def accuracy(theta: Any, batch: tuple[jax.Array, jax.Array]) -> float:
    """The share of right answers."""
    return float((network(theta, batch[0]).argmax(-1) == batch[1]).mean())


def fit(theta: Any, batch: Any, optimizer: Any, steps: int, past: Any = None) -> Any:
    """Train on one batch; with `past`, a function of theta, under the gate."""
    state = optimizer.init(theta)

    @jax.jit
    def step(theta: Any, state: Any, g_hat: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(theta, batch), state, theta, preservation=g_hat)
        return optax.apply_updates(theta, updates), state

    for number in range(steps):
        if number % 25 == 0:
            g_hat = jax.tree.map(jnp.zeros_like, theta) if past is None else past(theta)
        theta, state = step(theta, state, g_hat)
    return theta


def main() -> dict[str, float]:
    """Compare the plain optimizer with the gated one at the same number of steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 6)
    inputs, outputs = 16, 4
    theta = {
        "in": jax.random.normal(keys[0], (inputs, 64)) / 4,
        "bias": jnp.zeros(64),
        "out": jax.random.normal(keys[1], (64, outputs)) / 8,
    }
    rule = jax.random.normal(keys[2], (inputs, outputs))
    points = jax.random.normal(keys[3], (512, inputs))
    known = (points, (points @ rule).argmax(-1))
    theta = fit(theta, known, optax.with_extra_args_support(optax.adamw(1e-2)), 300)
    news = jax.random.normal(keys[4], (24, inputs))
    new = (news, (network(theta, news).argmax(-1) + 1) % outputs)  # what the network gets wrong today
    anchors = (known[0][:8], known[1][:8])
    asked = jax.random.normal(keys[5], (64, inputs))
    probes = (asked, network(theta, asked).argmax(-1))

    gradient = jax.jit(jax.grad(loss))
    found = {"kept before": accuracy(theta, known)}
    plain = fit(theta, new, optax.with_extra_args_support(optax.adamw(1e-3)), options.steps)
    gated = fit(
        theta,
        new,
        optax.chain(optax.adamw(1e-3), collaborative(0.9)),  # the gate comes last
        options.steps,
        past=lambda now: blend(gradient(now, anchors), gradient(now, probes)),
    )
    for name, after in (("plain", plain), ("gated", gated)):
        found |= {f"learned {name}": accuracy(after, new), f"kept {name}": accuracy(after, known)}
    print({name: round(value, 3) for name, value in found.items()})
    return found


if __name__ == "__main__":
    main()
