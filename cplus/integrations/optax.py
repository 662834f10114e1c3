"""The gate in JAX: as an optax transformation, and as a plain loop with evidence and a state to save; no torch."""

from __future__ import annotations

import math
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cplus.base.files import replacing
from cplus.core.rows import ZERO_EVIDENCE

# The gate as an optax transformation, to be placed last in a chain; it needs JAX but not torch.


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


# CPLUS in a plain JAX loop: evidence, refresh, one compiled step and a state to save; it needs JAX but not torch.
#
# The parameters are accumulated in float32 and the losses are computed at a copy in `compute`, for instance bfloat16.
# Arrays keep the sharding they are given: shard the parameters and the batches, and everything else follows.


LossFunction: TypeAlias = Callable[[Any, Any], jax.Array]
Entry: TypeAlias = tuple[float, Iterable[Any], LossFunction]
"""A weight, the batches and the function `loss(params, batch)` of one source of evidence."""
FORMAT = "cplus-jax/1"


class State(NamedTuple):
    """What a step changes: the accumulated parameters, the state of optimizer and gate, the evidence's signs."""

    theta: Any
    optimizer: Any
    signs: Any
    refreshes: int = 0


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The loss of the new data, an optimizer, and the evidence of past behaviour that gates its updates."""

    loss: LossFunction
    optimizer: optax.GradientTransformation
    evidence: Sequence[Entry]
    beta: float = 0.9
    compute: Any = None

    def __post_init__(self) -> None:
        if not self.evidence:
            raise ValueError("the loop needs evidence of past behaviour: give [(weight, batches, loss), ...]")
        for number, (weight, batches, _) in enumerate(self.evidence, start=1):
            if not 0.0 < weight < math.inf:
                raise ValueError(f"the weight of evidence {number} must be a positive number, got {weight}")
            if hasattr(batches, "__next__"):
                raise TypeError(
                    f"evidence {number} has a {type(batches).__name__}, which can be read only once, and every refresh "
                    "reads all batches; give a list"
                )

    def init(self, params: Any) -> State:
        """The state before the first refresh; parameters of 16 bits are accumulated in float32."""
        theta = jax.tree.map(lambda p: p.astype(jnp.promote_types(p.dtype, jnp.float32)), params)
        signs = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.int8), theta)
        return State(theta=theta, optimizer=self._gated.init(theta), signs=signs)

    def params(self, state: State) -> Any:
        """The parameters as the losses see them."""
        return self._copy(state.theta)

    def refresh(self, state: State) -> tuple[State, dict[str, float]]:
        """Compute the evidence at the current parameters; its losses are returned too.

        g_hat = sum_s w_s * mean_{b in s} grad( loss_s(theta, b) ), summed in float32; the gate reads its signs.
        """
        g_hat = jax.tree.map(jnp.zeros_like, state.theta)
        losses: dict[str, float] = {}
        for number, ((weight, batches, _), gradient) in enumerate(zip(self.evidence, self._past, strict=True), start=1):
            total, values = jax.tree.map(jnp.zeros_like, state.theta), []
            for batch in batches:
                value, part = gradient(state.theta, batch)
                total = jax.tree.map(jnp.add, total, part)
                values.append(float(value))
            if not values:
                raise ValueError(f"evidence {number} has no batch; give at least one")
            share = weight / len(values)
            g_hat = jax.tree.map(lambda held, part, share=share: held + share * part, g_hat, total)
            losses[f"evidence{number}"] = sum(values) / len(values)
        check_finite(g_hat, losses)
        signs = jax.tree.map(lambda g: jnp.sign(g).astype(jnp.int8), g_hat)
        return state._replace(signs=signs, refreshes=state.refreshes + 1), losses

    def step(self, state: State, *batches: Any) -> tuple[State, jax.Array]:
        """One gated update on the mean gradient of these batches, accumulated in float32, and their mean loss."""
        if not state.refreshes:
            raise RuntimeError("no evidence yet: call state, losses = loop.refresh(state) before the first step")
        if not batches:
            raise ValueError("step needs at least one batch: loop.step(state, batch)")
        loss, gradient = self._new(state.theta, batches[0])
        for batch in batches[1:]:
            more, part = self._new(state.theta, batch)
            loss, gradient = loss + more, jax.tree.map(jnp.add, gradient, part)
        theta, optimizer = self._apply(state.theta, state.optimizer, state.signs, gradient, len(batches))
        return state._replace(theta=theta, optimizer=optimizer), loss / len(batches)

    @cached_property
    def _gated(self) -> optax.GradientTransformationExtraArgs:
        return optax.chain(self.optimizer, collaborative(self.beta))

    @cached_property
    def _new(self) -> Callable[..., Any]:
        return self._gradient(self.loss, "the loss of the new data")

    @cached_property
    def _past(self) -> list[Callable[..., Any]]:
        return [self._gradient(loss, f"the loss of evidence {i}") for i, (_, _, loss) in enumerate(self.evidence, 1)]

    def _gradient(self, loss: LossFunction, name: str) -> Callable[..., Any]:
        """Loss and float32 gradient at the parameters' copy; compiled once for each shape of a batch."""

        def value(theta: Any, batch: Any) -> jax.Array:
            found = jnp.asarray(loss(self._copy(theta), batch))
            if found.ndim:
                raise ValueError(f"{name} must be a scalar, got the shape {found.shape}; return its mean")
            return found.astype(jnp.float32)

        return jax.jit(jax.value_and_grad(value))

    @cached_property
    def _apply(self) -> Callable[..., Any]:
        def apply(theta: Any, state: Any, signs: Any, gradient: Any, count: Any) -> tuple[Any, Any]:
            gradient = jax.tree.map(lambda g: g / count, gradient)
            updates, state = self._gated.update(gradient, state, theta, preservation=signs)
            return optax.apply_updates(theta, updates), state

        return jax.jit(apply)

    def _copy(self, theta: Any) -> Any:
        return theta if self.compute is None else jax.tree.map(lambda p: p.astype(self.compute), theta)


def check_finite(g_hat: Any, losses: Mapping[str, float]) -> None:
    """Refuse evidence that is not finite: it would gate coordinates at random. Warn if it is zero everywhere."""
    for name, loss in losses.items():
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of {name} is {loss}: evidence must be finite")
    sizes = jax.tree_util.tree_map(lambda g: jnp.abs(g).max(initial=0.0), g_hat)
    for path, size in jax.tree_util.tree_leaves_with_path(sizes):
        if not math.isfinite(size):
            raise FloatingPointError(f"the evidence for {jax.tree_util.keystr(path)} is not finite; check its batches")
    if not any(float(size) for size in jax.tree_util.tree_leaves(sizes)):
        warnings.warn(ZERO_EVIDENCE, stacklevel=3)


def save(state: State, file: Path | str) -> None:
    """Write a state as one NumPy archive; a crash leaves the old file whole."""
    leaves = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    # NumPy cannot store bfloat16: its bits are stored, and `restore` knows the type.
    plain = {name: leaf.view(np.uint16) if leaf.dtype == jnp.bfloat16 else leaf for name, leaf in leaves.items()}
    with replacing(Path(file)) as part, part.open("wb") as stream:
        np.savez(stream, format=np.array(FORMAT), **plain)  # type: ignore[arg-type]


def restore(file: Path | str, like: State) -> State:
    """Read a state for the same parameters and optimizer; each array gets the sharding it has in `like`."""
    if not zipfile.is_zipfile(file):
        raise ValueError(f"{file}: expected a state written by save, which is a NumPy archive (.npz)")
    with np.load(file, allow_pickle=False) as saved:
        if str(saved.get("format")) != FORMAT:
            raise ValueError(f"{file}: expected a state of the format {FORMAT}, got {saved.get('format')}")
        known = jax.tree_util.tree_leaves_with_path(like)
        names = {jax.tree_util.keystr(path) for path, _ in known}
        if names != set(saved.files) - {"format"}:
            odd = sorted(names ^ (set(saved.files) - {"format"}))[0]
            raise ValueError(f"{file} belongs to other parameters or another optimizer: {odd} is in one of them only")

        def read(path: Any, held: Any) -> Any:
            name = jax.tree_util.keystr(path)
            value = saved[name]
            if value.shape != np.shape(held):
                raise ValueError(f"{file} has {name} of shape {value.shape}, and this run {np.shape(held)}")
            if not isinstance(held, jax.Array):
                return type(held)(value)
            typed = value.view(held.dtype) if held.dtype == jnp.bfloat16 else value
            # A scalar that is bound to no device stays so: bound to one, it could not meet parameters on many.
            return jax.device_put(typed, held.sharding) if held.committed else jnp.asarray(typed)

        restored: State = jax.tree_util.tree_map_with_path(read, like)
        return restored
