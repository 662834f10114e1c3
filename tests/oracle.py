"""An independent float64 oracle in NumPy: the optimizers from their papers, and the gate from Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Optimizer:
    """`update(theta, gradient, t, state) -> new theta` per tensor, with a dictionary of state each."""

    rule: Callable[[Array, Array, int, dict[str, Array]], Array]
    t: int = 0
    state: list[dict[str, Array]] = field(default_factory=list)

    def __call__(self, theta: Sequence[Array], gradients: Sequence[Array]) -> list[Array]:
        self.t += 1
        self.state = self.state or [{} for _ in theta]
        return [self.rule(p, g, self.t, s) for p, g, s in zip(theta, gradients, self.state, strict=True)]


def sgd(lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    def rule(p: Array, g: Array, t: int, state: dict[str, Array]) -> Array:
        g = g + weight_decay * p
        if momentum:
            state["v"] = g if t == 1 else momentum * state["v"] + g
            g = g + momentum * state["v"] if nesterov else state["v"]
        return p - lr * g

    return Optimizer(rule)


def adam(lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, decoupled: float = 0.0) -> Optimizer:
    def rule(p: Array, g: Array, t: int, state: dict[str, Array]) -> Array:
        p = p * (1 - lr * decoupled)
        state["m"] = betas[0] * state.get("m", np.zeros_like(p)) + (1 - betas[0]) * g
        state["v"] = betas[1] * state.get("v", np.zeros_like(p)) + (1 - betas[1]) * g * g
        m, v = state["m"] / (1 - betas[0] ** t), state["v"] / (1 - betas[1] ** t)
        return p - lr * m / (np.sqrt(v) + eps)

    return Optimizer(rule)


def adagrad(lr: float, eps: float = 1e-10) -> Optimizer:
    def rule(p: Array, g: Array, t: int, state: dict[str, Array]) -> Array:
        state["s"] = state.get("s", np.zeros_like(p)) + g * g
        return p - lr * g / (np.sqrt(state["s"]) + eps)

    return Optimizer(rule)


def rmsprop(lr: float, alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0) -> Optimizer:
    def rule(p: Array, g: Array, t: int, state: dict[str, Array]) -> Array:
        state["s"] = alpha * state.get("s", np.zeros_like(p)) + (1 - alpha) * g * g
        state["b"] = momentum * state.get("b", np.zeros_like(p)) + g / (np.sqrt(state["s"]) + eps)
        return p - lr * state["b"]

    return Optimizer(rule)


def adafactor(lr: float, eps: tuple[float, float], decay: float = -0.8) -> Optimizer:
    def rule(p: Array, g: Array, t: int, state: dict[str, Array]) -> Array:
        new = float(t) ** decay
        alpha = max(eps[1], np.linalg.norm(p) / p.size**0.5) * min(lr, 1 / t**0.5)
        if g.ndim > 1:
            for axis in (-1, -2):
                mean = (g * g).mean(axis=axis, keepdims=True)
                state[str(axis)] = (1 - new) * state.get(str(axis), np.zeros_like(mean)) + new * mean
            rows, columns = state["-1"], state["-2"]
            variance = rows @ columns / np.maximum(rows.mean(axis=-2, keepdims=True), eps[0])
        else:
            state["v"] = (1 - new) * state.get("v", np.zeros_like(g)) + new * g * g
            variance = state["v"]
        update = g / np.sqrt(np.maximum(variance, eps[0] ** 2))
        return p - alpha * update / max(1.0, np.linalg.norm(update) / update.size**0.5)

    return Optimizer(rule)


def gated_steps(
    theta: Sequence[Array],
    optimizer: Optimizer,
    new_gradients: Callable[[Sequence[Array], int], list[Array]],
    preservation: Callable[[Sequence[Array]], list[Array]],
    *,
    steps: int,
    refresh_every: int,
    beta: float,
) -> list[list[Array]]:
    """The parameters after each step of Algorithm 1."""
    theta = [p.copy() for p in theta]
    ema = [np.zeros_like(p) for p in theta]
    trajectory = []
    for t in range(1, steps + 1):
        if (t - 1) % refresh_every == 0:
            g_hat = preservation(theta)
        proposed = optimizer(theta, new_gradients(theta, t))
        for i, p in enumerate(theta):
            delta = proposed[i] - p
            mask = (g_hat[i] * delta <= 0).astype(np.float64)
            ema[i] = beta * ema[i] + (1 - beta) * mask
            theta[i] = p + np.clip(ema[i] / (1 - beta**t), 0, 1) * delta
        trajectory.append([p.copy() for p in theta])
    return trajectory
