"""Objectives: the scalar whose gradient the optimizer sees."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from cplus.cost import Work
from cplus.data.batching import batched, measured
from cplus.data.encoded import Encoded

if TYPE_CHECKING:  # the table of methods is read without torch
    from torch import Tensor, nn

Kind: TypeAlias = Literal["new", "anchors", "probes", "synthetic", "constant", "balanced"]
Backward: TypeAlias = Callable[[Sequence[Encoded]], tuple[float, Work]]


class Build(Protocol):
    """Binds an objective to a model and to the past rows that it uses."""

    @property
    def needs(self) -> tuple[Kind, ...]:
        """The kinds of past rows it requires."""
        ...

    @property
    def bytes_per_parameter(self) -> float:
        """The memory it holds besides the model when training in float32."""
        ...

    @property
    def anchor_passes(self) -> float:
        """Forward-and-backward passes over the anchors per update; a forward pass alone counts one third."""
        ...

    def __call__(self, model: nn.Module, anchors: Sequence[Encoded]) -> Backward:
        """A function that adds one batch's gradient to `.grad` and returns its loss and work."""
        ...


def mean_backward(
    model: nn.Module,
    rows: Sequence[Encoded],
    losses: Callable[[nn.Module, Sequence[Encoded]], Tensor],
    weight: float = 1.0,
) -> tuple[float, Work]:
    """Add the gradient of `weight` times the rows' mean loss, in passes of bounded memory."""
    total, work = 0.0, Work()
    for part in batched(rows):
        loss = losses(model, part).sum() * (weight / len(rows))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        work += measured(part)
    return total, work


@dataclass(frozen=True)
class Answers:
    """The answers' cross-entropy: SFT's objective, the mean over rows of each row's mean token loss."""

    needs: tuple[Kind, ...] = ()
    bytes_per_parameter: float = 0.0
    anchor_passes: float = 0.0

    def __call__(self, model: nn.Module, anchors: Sequence[Encoded]) -> Backward:
        """Past rows are not used."""
        from cplus.losses import answer_losses

        return lambda rows: mean_backward(model, rows, answer_losses)


answers = Answers()


@dataclass(frozen=True)
class Distillation:
    """The answers' cross-entropy plus `weight` times KL(frozen || model) on the anchors.

    Source: Hinton et al. 2015; the weight is ours (docs/interpretations.md).
    """

    weight: float
    needs: tuple[Kind, ...] = ("anchors",)
    bytes_per_parameter: float = 4.0
    anchor_passes: float = 4 / 3  # the teacher's forward pass too

    def __call__(self, model: nn.Module, anchors: Sequence[Encoded]) -> Backward:
        """The frozen model is a copy of the current one."""
        from cplus.losses import answer_losses, divergences

        frozen = copy.deepcopy(model).eval().requires_grad_(False)

        def divergence(student: nn.Module, rows: Sequence[Encoded]) -> Tensor:
            return divergences(student, frozen, rows)

        def backward(rows: Sequence[Encoded]) -> tuple[float, Work]:
            loss, work = mean_backward(model, rows, answer_losses)
            if self.weight:
                extra, passed = mean_backward(model, anchors, divergence, self.weight)
                loss, work = loss + extra, work + passed + Work(forward=passed.padded)
            return loss, work

        return backward


@dataclass(frozen=True)
class ElasticWeights:
    """The answers' cross-entropy plus EWC's penalty, with the anchors' empirical Fisher at the base model.

    Source: Kirkpatrick et al. 2017, Eq. 3.    L + weight / 2 * sum_i F_i (theta_i - theta0_i)^2

    The penalty's gradient is added in closed form; F is the mean over anchors of the squared gradient.
    """

    weight: float
    needs: tuple[Kind, ...] = ("anchors",)
    bytes_per_parameter: float = 8.0
    anchor_passes: float = 0.0

    def __call__(self, model: nn.Module, anchors: Sequence[Encoded]) -> Backward:
        """The Fisher information and the base parameters are those of the current model."""
        import torch

        from cplus.evidence import borrowed_gradients, take_gradients
        from cplus.losses import answer_losses

        params = [p for p in model.parameters() if p.requires_grad]
        fisher, base = [torch.zeros_like(p) for p in params], [p.detach().clone() for p in params]
        with borrowed_gradients(model, params):
            for row in anchors:
                mean_backward(model, [row], answer_losses)
                for f, g in zip(fisher, take_gradients(model, params), strict=True):
                    f.addcmul_(g, g, value=1.0 / len(anchors))

        def backward(rows: Sequence[Encoded]) -> tuple[float, Work]:
            loss, work = mean_backward(model, rows, answer_losses)
            for p, f, b in zip(params, fisher, base, strict=True):
                assert p.grad is not None
                moved = p.detach() - b
                p.grad.addcmul_(f, moved, value=self.weight)
                loss += 0.5 * self.weight * float((f * moved * moved).sum())
            return loss, work

        return backward


def check_finite(loss: float, step: int) -> None:
    """Stop before a non-finite loss reaches the parameters."""
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss is {loss} at step {step}; the parameters are unchanged. Lower the learning rate, clip the "
            "gradient or check the batch"
        )
