"""Fifty steps on eight simulated devices and on one, and the golden vectors on eight: the differences as JSON.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/eight_devices.py STATE_FILE GOLDEN_FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from cplus.integrations.optax import Loop, State, restore, save

MESH = Mesh(np.array(jax.devices()), ("all",))
ROWS, WHOLE = NamedSharding(MESH, PartitionSpec("all")), NamedSharding(MESH, PartitionSpec())
ONE = SingleDeviceSharding(jax.devices()[0])
NAMES = ("in", "bias", "out")


def loss(theta: Any, batch: Any) -> jax.Array:
    out = jnp.tanh(batch[0] @ theta["in"] + theta["bias"]) @ theta["out"]
    return optax.softmax_cross_entropy_with_integer_labels(out, batch[1]).mean()


def inner(theta: Any, vector: Any) -> jax.Array:
    return sum((p * v).sum() for p, v in zip(theta, vector, strict=True))


def batch(seed: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 2)
    return jax.random.normal(keys[0], (16, 16)), jax.random.randint(keys[1], (16,), 0, 8)


def start() -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(0), 2)
    return {
        "in": jax.random.normal(first, (16, 32)) / 4,
        "bias": jnp.zeros(32),
        "out": jax.random.normal(second, (32, 8)) / 6,
    }


def run(place: Any, spread: Any, file: str | None = None) -> State:
    """Fifty steps with parameters and batches placed so, saved and restored half way if there is a file."""
    past = [jax.device_put(batch(100 + i), spread) for i in range(3)]
    entries = [(0.5, past[:1], loss), (0.5, past[1:], loss)]
    loop = Loop(loss=loss, optimizer=optax.adamw(1e-2, weight_decay=0.1), evidence=entries)
    state = loop.init(jax.device_put(start(), place))
    for number in range(50):
        if number % 10 == 0:
            state, _ = loop.refresh(state)
        if number == 25 and file:
            save(state, file)
            state = restore(file, loop.init(jax.device_put(start(), place)))
        state, _ = loop.step(state, jax.device_put(batch(number), spread))
    return state


def apart(a: Any, b: Any) -> float:
    return max(float(np.abs(np.asarray(a[name]) - np.asarray(b[name])).max()) for name in NAMES)


def tiled(vectors: list[list[float]]) -> list[jax.Array]:
    """Eight copies of each vector, one on each device."""
    return [jax.device_put(jnp.tile(jnp.array(vector), (8, 1)), ROWS) for vector in vectors]


def golden_error(golden: Any) -> float:
    worst = 0.0
    for case in golden["cases"]:
        past: list[Any] = []
        loop = Loop(loss=inner, optimizer=optax.sgd(1.0), evidence=[(1.0, past, inner)], beta=case["beta"])
        state = loop.init(tiled(golden["theta"]))
        for step in golden["steps"]:
            past[:] = [tiled(step["g_hat"])]
            state, _ = loop.refresh(state)
            state, _ = loop.step(state, [-u for u in tiled(step["update"])])
        for p, expected in zip(state.theta, case["expected"][-1]["theta"], strict=True):
            worst = max(worst, float(np.abs(np.asarray(p) - np.array(expected)).max()))
    return worst


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    assert "torch" not in sys.modules
    alone = run(ONE, ONE)
    found: dict[str, Any] = {"moved": apart(alone.theta, start())}
    for name, place in (("replicated", WHOLE), ("sharded", ROWS)):
        state = run(place, ROWS, sys.argv[1])
        found[name] = apart(state.theta, alone.theta)
        trees = (state.theta, state.optimizer[-1].ema, state.signs)
        found[f"{name} parts"] = sorted({str(tree["in"].sharding.shard_shape((16, 32))) for tree in trees})
    print(json.dumps({**found, "golden": golden_error(json.loads(Path(sys.argv[2]).read_text()))}))
