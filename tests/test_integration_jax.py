"""The plain JAX loop: the golden numbers, evidence, bfloat16 passes, a saved state, and eight simulated devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cplus.integrations.optax import Loop, State, restore, save

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


def inner(theta: Any, vector: Any) -> jax.Array:
    """A loss whose gradient is the vector."""
    return sum(jnp.vdot(p, v) for p, v in zip(theta, vector, strict=True))


def vectors(rows: list[list[float]], copies: int = 1) -> list[jax.Array]:
    return [jnp.tile(jnp.array(row), (copies, 1)) for row in rows]


def golden_steps(loop: Loop, past: list[Any], state: State, first: int, last: int, copies: int = 1) -> State:
    for step in GOLDEN["steps"][first:last]:
        past[:] = [vectors(step["g_hat"], copies)]
        state, losses = loop.refresh(state)
        assert list(losses) == ["evidence1"]
        state, _ = loop.step(state, [-u for u in vectors(step["update"], copies)])  # SGD at rate 1 adds the update
    return state


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"beta={case['beta']}")
def test_the_loop_gives_the_golden_vectors_saved_and_restored(case: dict[str, Any], tmp_path: Path) -> None:
    past: list[Any] = []
    loop = Loop(loss=inner, optimizer=optax.sgd(1.0), evidence=[(0.5, past, inner)], beta=case["beta"])
    state = golden_steps(loop, past, loop.init(vectors(GOLDEN["theta"])), 0, 2)
    save(state, tmp_path / "state.npz")
    state = restore(tmp_path / "state.npz", loop.init(vectors(GOLDEN["theta"])))
    assert state.refreshes == 2
    state = golden_steps(loop, past, state, 2, 5)
    for p, expected in zip(loop.params(state), case["expected"][4]["theta"], strict=True):
        np.testing.assert_allclose(p[0], expected, rtol=1e-6, atol=1e-6)


def test_the_evidence_is_the_weighted_sum_of_each_sources_mean() -> None:
    theta = [jnp.zeros(3)]
    sources = [[[1.0, -4.0, 0.0], [3.0, 0.0, 0.0]], [[-5.0, 1.0, 0.0]]]
    entries = [(w, [[jnp.array(v)] for v in own], inner) for w, own in zip((0.5, 0.25), sources, strict=True)]
    loop = Loop(loss=inner, optimizer=optax.sgd(1.0), evidence=entries)
    state, losses = loop.refresh(loop.init(theta))
    # 0.5 * mean of the first two + 0.25 * the third: (1, -1, 0) + (-1.25, 0.25, 0)
    assert state.signs[0].tolist() == [-1, -1, 0]
    assert (state.signs[0].dtype, losses) == (jnp.int8, {"evidence1": 0.0, "evidence2": 0.0})
    before = state
    state, loss = loop.step(state, [jnp.array([2.0, -2.0, 4.0])], [jnp.array([4.0, -2.0, 0.0])])
    # the mean gradient is (3, -2, 2); the update -3 would raise the past loss, +2 and -2 would not
    assert state.theta[0].tolist() == pytest.approx([0.0, 2.0, -2.0])
    assert float(loss) == 0.0
    assert before.theta[0].tolist() == [0.0, 0.0, 0.0]


def test_bfloat16_parameters_accumulate_in_float32() -> None:
    seen = []

    def loss(theta: Any, batch: jax.Array) -> jax.Array:
        seen.append(theta["w"].dtype)
        return (theta["w"] * batch).sum()

    past = [jnp.array([-1.0, 1.0], jnp.bfloat16)]
    loop = Loop(loss=loss, optimizer=optax.adamw(1e-4), evidence=[(1.0, past, loss)], compute=jnp.bfloat16)
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    state, _ = loop.refresh(loop.init(params))
    for _ in range(60):
        state, _ = loop.step(state, jnp.array([-1.0, -1.0], jnp.bfloat16))
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    floats = {leaf.dtype for leaf in jax.tree.leaves((state.theta, state.optimizer)) if leaf.ndim}
    assert floats == {jnp.dtype(jnp.float32)}
    # A step of 1e-4 is below half an ulp of bfloat16 at 1 (0.0039): in 16 bits the weight would never move.
    assert float(state.theta["w"][0]) == pytest.approx(1.006, abs=1e-4)
    assert float(state.theta["w"][1]) == 1.0  # gated: the past wants it smaller
    assert loop.params(state)["w"].dtype == jnp.bfloat16
    assert float(loop.params(state)["w"][0]) == 1.0078125


def test_bfloat16_moments_are_saved_bit_for_bit(tmp_path: Path) -> None:
    optimizer = optax.adam(1e-2, mu_dtype=jnp.bfloat16)
    loop = Loop(loss=inner, optimizer=optimizer, evidence=[(1.0, [[jnp.ones(3)]], inner)])
    state, _ = loop.refresh(loop.init([jnp.arange(3.0)]))
    state, _ = loop.step(state, [jnp.array([0.1, 0.2, 0.3])])
    save(state, tmp_path / "state.npz")
    again = restore(tmp_path / "state.npz", loop.init([jnp.zeros(3)]))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert getattr(a, "dtype", int) == getattr(b, "dtype", int)


def test_bad_evidence_and_states_are_named(tmp_path: Path) -> None:
    options = {"loss": inner, "optimizer": optax.sgd(1.0)}
    with pytest.raises(ValueError, match="the loop needs evidence"):
        Loop(**options, evidence=[])
    with pytest.raises(ValueError, match="weight of evidence 1 must be a positive number, got 0"):
        Loop(**options, evidence=[(0, [1], inner)])
    with pytest.raises(TypeError, match="a list_iterator, which can be read only once"):
        Loop(**options, evidence=[(1.0, iter([1]), inner)])
    theta = [jnp.ones(2)]
    loop = Loop(**options, evidence=[(1.0, [[jnp.ones(2)]], inner)])
    with pytest.raises(RuntimeError, match="no evidence yet"):
        loop.step(loop.init(theta), [jnp.ones(2)])
    state, _ = loop.refresh(loop.init(theta))
    with pytest.raises(ValueError, match="step needs at least one batch"):
        loop.step(state)
    for batches, words in (([], "evidence 1 has no batch"), ([[jnp.array([jnp.nan, 0.0])]], "evidence must be finite")):
        with pytest.raises((ValueError, FloatingPointError), match=words):
            Loop(**options, evidence=[(1.0, batches, inner)]).refresh(loop.init(theta))
    steep = Loop(**options, evidence=[(1.0, [0], lambda theta, _: jnp.sqrt(theta[0] - 1.0).sum())])
    with pytest.raises(FloatingPointError, match=r"the evidence for \[0\] is not finite"):
        steep.refresh(loop.init(theta))
    wide = Loop(**options, evidence=[(1.0, [0], lambda theta, _: theta[0])])
    with pytest.raises(ValueError, match=r"the loss of evidence 1 must be a scalar, got the shape \(2,\)"):
        wide.refresh(loop.init(theta))
    with pytest.warns(UserWarning, match="zero everywhere"):
        Loop(**options, evidence=[(1.0, [[jnp.zeros(2)]], inner)]).refresh(loop.init(theta))
    save(state, tmp_path / "state.npz")
    with pytest.raises(ValueError, match=r"has \.theta\[0\] of shape \(2,\), and this run \(3,\)"):
        restore(tmp_path / "state.npz", loop.init([jnp.ones(3)]))
    with pytest.raises(ValueError, match="belongs to other parameters or another optimizer"):
        restore(tmp_path / "state.npz", loop.init([jnp.ones(2), jnp.ones(2)]))
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(ValueError, match="expected a state written by save"):
        restore(tmp_path / "text", state)


@pytest.mark.long
def test_eight_simulated_devices_equal_one_after_fifty_steps(tmp_path: Path) -> None:
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    golden = str(Path(__file__).parent / "golden.json")
    script = Path(__file__).parent / "eight_devices.py"
    command = [sys.executable, str(script), str(tmp_path / "state.npz"), golden]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["moved"] > 0.05
    assert found["replicated"] < 1e-6
    assert found["sharded"] < 1e-6
    assert found["golden"] < 1e-6
    assert found["replicated parts"] == ["(16, 32)"]
    assert found["sharded parts"] == ["(2, 32)"]  # parameters, average and evidence: an eighth on each device
