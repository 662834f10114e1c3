"""The gate as an optax transformation, to be placed last in a chain; it needs JAX but not torch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class CollaborativeState(NamedTuple):
    """The number of steps taken and the mask's moving average."""

    steps: jax.Array
    ema: Any


def collaborative(beta: float = 0.9) -> optax.GradientTransformationExtraArgs:
    """Scale down the coordinates of an update that are harmful according to `preservation`, the gradient on past rows.

    This is Algorithm 1 from the mask to the applied update, in JAX; beta = 0 is CPL. Optax updates are ADDED to
    the parameters, so place it after everything that changes them, including weight decay and learning rate:

        optimizer = optax.chain(optax.adamw(1e-5), collaborative(0.9))
        updates, state = optimizer.update(gradient, state, params, preservation=g_hat)
    """
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta must lie in [0, 1), got {beta}")

    def init(params: optax.Params) -> CollaborativeState:
        return CollaborativeState(steps=jnp.zeros([], jnp.int32), ema=jax.tree.map(zeros, params) if beta else None)

    def update(
        updates: optax.Updates,
        state: CollaborativeState,
        params: optax.Params | None = None,
        *,
        preservation: optax.Updates | None = None,
        **_: Any,
    ) -> tuple[optax.Updates, CollaborativeState]:
        if preservation is None:
            raise ValueError("collaborative needs the gradient on past rows: pass update(..., preservation=g_hat)")
        steps = state.steps + 1
        masks = jax.tree.map(mask, preservation, updates)
        if not beta:  # the average is the mask itself and needs no state
            return jax.tree.map(scaled, masks, updates), CollaborativeState(steps=steps, ema=None)
        # 1 - beta**t by expm1: in float32 the subtraction would lose digits that matter in the first steps.
        correction = -jnp.expm1(steps * math.log(beta))
        ema = jax.tree.map(lambda e, m: beta * e + (1.0 - beta) * m, state.ema, masks)
        gated = jax.tree.map(lambda e, u: scaled(jnp.clip(e / correction, 0.0, 1.0), u), ema, updates)
        return gated, CollaborativeState(steps=steps, ema=ema)

    return optax.GradientTransformationExtraArgs(init, update)


def zeros(p: jax.Array) -> jax.Array:
    """The moving average before the first step, in float32 or in the parameter's precision if finer."""
    return jnp.zeros_like(p, dtype=jnp.promote_types(p.dtype, jnp.float32))


def scaled(coefficient: jax.Array, update: jax.Array) -> jax.Array:
    """The applied update, in the update's own precision."""
    return (coefficient * update).astype(update.dtype)


def mask(g_hat: jax.Array, update: jax.Array) -> jax.Array:
    """1 where the update is not predicted to raise the preservation loss, else 0; signs, so that nothing underflows."""
    return (jnp.sign(g_hat) * jnp.sign(update) <= 0).astype(jnp.float32)


def blend(g_anchor: optax.Updates, g_probe: optax.Updates, anchor_weight: float = 0.5) -> optax.Updates:
    """The preservation gradient: w * g_anchor + (1 - w) * g_probe, without rescaling either source."""
    if not 0.0 <= anchor_weight <= 1.0:
        raise ValueError(f"anchor_weight must lie in [0, 1], got {anchor_weight}")
    return jax.tree.map(lambda a, b: anchor_weight * a + (1.0 - anchor_weight) * b, g_anchor, g_probe)
