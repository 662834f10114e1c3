"""A plain JAX loop in bfloat16, sharded over all devices, saved half way.    python examples/jax_loop.py

XLA_FLAGS=--xla_force_host_platform_device_count=8 simulates eight devices on a CPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from cplus.integrations.optax import Loop, restore, save


def loss(theta: Any, batch: jax.Array) -> jax.Array:
    """The squared error of a linear map that should send each row to its sum."""
    return jnp.square(batch.astype(theta.dtype) @ theta - batch.sum(1, keepdims=True)).mean()


def main() -> float:
    """Learn new rows and keep the past ones."""
    mesh = jax.make_mesh((len(jax.devices()),), ("all",))
    rows = NamedSharding(mesh, PartitionSpec("all"))
    old, new = (jax.device_put(jax.random.normal(jax.random.key(i), (64, 16)), rows) for i in range(2))
    theta = jax.device_put(jnp.ones((16, 8)) * 0.5, rows)
    loop = Loop(loss=loss, optimizer=optax.adamw(1e-2), evidence=[(1.0, [old], loss)], compute=jnp.bfloat16)
    state, file = loop.init(theta), Path(tempfile.mkdtemp()) / "state.npz"
    for _ in range(10):
        state, past = loop.refresh(state)
        for _ in range(10):
            state, value = loop.step(state, new)
        save(state, file)
        state = restore(file, state)  # as a new process would, from loop.init(theta)
    print(f"{len(jax.devices())} devices: loss {float(value):.4f}, past loss {past['evidence1']:.4f}")
    return float(value)


if __name__ == "__main__":
    main()
