"""An independent float64 oracle in NumPy: the optimizers from their papers, and the gate from Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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


class LBFGS:
    """Limited-memory BFGS without a line search (Nocedal and Wright, Algorithm 7.4), several evaluations a step."""

    def __init__(self, lr: float, max_iter: int, history: int) -> None:
        self.lr, self.max_iter, self.history = lr, max_iter, history
        self.t = 0
        self.pairs: list[tuple[Array, Array]] = []
        self.scale, self.size = 1.0, 1.0
        self.direction = self.before = np.zeros(0)

    def __call__(self, theta: Sequence[Array], gradients: Callable[[Sequence[Array]], list[Array]]) -> list[Array]:
        shapes, theta = [p.shape for p in theta], [p.copy() for p in theta]
        for _ in range(self.max_iter):
            g = np.concatenate([part.ravel() for part in gradients(theta)])
            self.t += 1
            if self.t > 1:
                y, s = g - self.before, self.direction * self.size
                if y @ s > 1e-10:
                    self.pairs = [*self.pairs, (y, s)][-self.history :]
                    self.scale = float(y @ s / (y @ y))
            self.direction, self.before = -self._two_loops(g), g
            self.size = self.lr * (min(1.0, 1.0 / float(np.abs(g).sum())) if self.t == 1 else 1.0)
            cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
            moves = np.split(self.size * self.direction, cuts)
            theta = [p + move.reshape(shape) for p, move, shape in zip(theta, moves, shapes, strict=True)]
        return theta

    def _two_loops(self, g: Array) -> Array:
        q, alphas = g, []
        for y, s in reversed(self.pairs):
            alphas.append(s @ q / (y @ s))
            q = q - alphas[-1] * y
        r = self.scale * q
        for (y, s), alpha in zip(self.pairs, reversed(alphas), strict=True):
            r = r + s * (alpha - y @ r / (y @ s))
        return r


def gated_steps(
    theta: Sequence[Array],
    optimizer: Optimizer | LBFGS,
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
        if isinstance(optimizer, LBFGS):
            proposed = optimizer(theta, partial(new_gradients, t=t))
        else:
            proposed = optimizer(theta, new_gradients(theta, t))
        for i, p in enumerate(theta):
            delta = proposed[i] - p
            mask = (g_hat[i] * delta <= 0).astype(np.float64)
            ema[i] = beta * ema[i] + (1 - beta) * mask
            theta[i] = p + np.clip(ema[i] / (1 - beta**t), 0, 1) * delta
        trajectory.append([p.copy() for p in theta])
    return trajectory


def curvature_coefficients(squares: Sequence[Array], share: float) -> list[Array]:
    """d / (d + F) with the d for which the mean over F > 0 is the share, by bisection on all coordinates."""
    used = np.concatenate([f[f > 0] for f in squares])
    low, high = float(used.min()) * 1e-12, float(used.max()) * 1e12
    for _ in range(400):
        d = np.sqrt(low * high)
        low, high = (d, high) if np.mean(d / (d + used)) < share else (low, d)
    return [d / (d + f) for f in squares]
