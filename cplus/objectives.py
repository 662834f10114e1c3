"""Objectives: the scalar whose gradient the optimizer sees."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from cplus import world
from cplus.cost import Work
from cplus.data.batching import MAX_TOKENS, batched, like_length, measured
from cplus.data.encoded import Encoded
from cplus.data.material import Material, Rows

if TYPE_CHECKING:  # the table of methods is read without torch
    from torch import Tensor, nn

    from cplus.ranks import Layout

Backward: TypeAlias = Callable[[Sequence[Encoded]], tuple[float, Work]]


class Build(Protocol):
    """Binds an objective to a model and to the rows that it uses besides the batch.

    One that has a field `strength` is configured by the setting of that name.
    """

    @property
    def needs(self) -> tuple[Rows, ...]:
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

    @property
    def read_by_base(self) -> tuple[Rows, ...]:
        """The kinds of trained rows that the frozen model reads too: one more forward pass each."""
        ...

    def __call__(self, model: nn.Module, material: Material) -> Backward:
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


def spread_backward(
    model: nn.Module, rows: Sequence[Encoded], losses: Callable[[nn.Module, Sequence[Encoded]], Tensor]
) -> tuple[float, Work]:
    """`mean_backward` with the passes split over the processes of a job: every one gets the gradient of all rows."""
    from cplus.evidence import named
    from cplus.passes import drawing, passing, turns
    from cplus.ranks import layout

    params, made = [p for p in model.parameters() if p.requires_grad], passing(model)
    where, device = layout(params, named(model)), params[0].device
    batches = list(like_length(rows, MAX_TOKENS, made.parts or where.world))
    scale, work, found = made.scale(where) / len(rows), Work(), [0.0] * len(batches)
    with drawing(device) as draw:
        for turn in turns(batches, where):
            draw(turn.number)
            part = [rows[item] for item in turn.items]
            loss = losses(model, part).sum()
            made.backward(loss * (turn.weight * scale), turn, params)
            if turn.weight:
                found[turn.number], work = float(loss.detach()) / len(rows), work + measured(part)
    if not where.sharded and not made.copies:
        sum_gradients(params, where)
    counts = where.sums([work.rows, work.tokens, work.padded, *found], device)
    return sum(counts[3:]), Work(rows=int(counts[0]), tokens=int(counts[1]), padded=int(counts[2]))


def sum_gradients(params: Sequence[nn.Parameter], where: Layout) -> None:
    """Each gradient's sum over the processes; they reach the same parameters in all of them."""
    for p in params:
        if p.grad is not None:
            where.sum(p.grad)


def averaged(backward: Backward, model: nn.Module) -> Backward:
    """An objective that needs the whole batch: every process computes it, and all continue with the same mean."""
    from cplus.ranks import layout

    params = [p for p in model.parameters() if p.requires_grad]
    where = layout(params, {})

    def mean(rows: Sequence[Encoded]) -> tuple[float, Work]:
        loss, work = backward(rows)
        sum_gradients(params, where)
        for p in params:
            if p.grad is not None:
                p.grad.div_(where.world)
        return where.sums([loss], params[0].device)[0] / where.world, work

    return mean


def splits(objective: object) -> bool:
    """Whether processes can share a batch of this objective, inside any wrappers, row by row."""
    while hasattr(objective, "inner"):
        objective = objective.inner
    return isinstance(objective, Answers)


@dataclass(frozen=True)
class Answers:
    """The answers' cross-entropy: SFT's objective, the mean over rows of each row's mean token loss."""

    needs: tuple[Rows, ...] = ()
    bytes_per_parameter: float = 0.0
    anchor_passes: float = 0.0
    read_by_base: tuple[Rows, ...] = ()

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """Past rows are not used."""
        from cplus.losses import answer_losses
        from cplus.passes import passing

        if world.size() > 1 or passing(model).parts is not None:
            return lambda rows: spread_backward(model, rows, answer_losses)
        return lambda rows: mean_backward(model, rows, answer_losses)


answers = Answers()


def copied(model: nn.Module) -> nn.Module:
    """The frozen model: a copy of the current one, 4 bytes per parameter in float32."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def check_strength(strength: float) -> None:
    """Refuse a weight of a penalty that would reward what it should prevent."""
    if not 0.0 <= strength < math.inf:
        raise ValueError(f"the strength of a penalty must be a number from 0 on, got {strength}")


def from_copy(model: nn.Module) -> Callable[[nn.Module, Sequence[Encoded]], Tensor]:
    """The divergence from a frozen copy of the model."""
    from cplus.losses import divergences

    frozen = copied(model)
    return lambda student, rows: divergences(student, frozen, rows)


def from_outputs(model: nn.Module, rows: Sequence[Encoded]) -> Callable[[nn.Module, Sequence[Encoded]], Tensor] | None:
    """The divergence from the model's outputs on these rows, kept batch by batch; None if they outweigh the model.

    With a letter as the answer they are one row of logits per anchor, where a copy of the model would not fit.
    """
    import torch

    from cplus.losses import divergences_from, target_logits

    config: Any = getattr(model, "config", None)
    vocabulary = None if config is None else config.get_text_config().vocab_size
    positions = sum(len(part) * max(len(row.target) for row in part) for part in batched(rows))
    if vocabulary is None or vocabulary * positions > sum(p.numel() for p in model.parameters()):
        return None
    mode = model.training
    with torch.no_grad():
        model.eval()
        kept = {tuple(part): target_logits(model, part)[0].clone() for part in batched(rows)}
        model.train(mode)
    return lambda student, part: divergences_from(kept[tuple(part)], student, part)


@dataclass(frozen=True)
class Distillation:
    """The answers' cross-entropy plus `strength` times KL(frozen || model) on the anchors.

    Source: Hinton et al. 2015; the strength is ours (docs/interpretations.md).
    """

    strength: float
    needs: tuple[Rows, ...] = ("anchors",)
    bytes_per_parameter: float = 4.0
    anchor_passes: float = 4 / 3  # the teacher's forward pass too
    read_by_base: tuple[Rows, ...] = ()

    def __post_init__(self) -> None:
        check_strength(self.strength)

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """The frozen model is the current one; where they are smaller than it, its outputs are kept in its place."""
        from cplus.losses import answer_losses

        anchors = material.rows("anchors")
        divergence = from_outputs(model, anchors) or from_copy(model)

        def backward(rows: Sequence[Encoded]) -> tuple[float, Work]:
            loss, work = mean_backward(model, rows, answer_losses)
            if self.strength:
                extra, passed = mean_backward(model, anchors, divergence, self.strength)
                loss, work = loss + extra, work + passed + Work(forward=passed.padded)
            return loss, work

        return backward


@dataclass(frozen=True)
class ElasticWeights:
    """The answers' cross-entropy plus EWC's penalty, with the anchors' empirical Fisher at the base model.

    Source: Kirkpatrick et al. 2017, Eq. 3.    L + strength / 2 * sum_i F_i (theta_i - theta0_i)^2

    The penalty's gradient is added in closed form; F is the mean over anchors of the squared gradient.
    """

    strength: float
    needs: tuple[Rows, ...] = ("anchors",)
    bytes_per_parameter: float = 8.0
    anchor_passes: float = 0.0
    read_by_base: tuple[Rows, ...] = ()

    def __post_init__(self) -> None:
        check_strength(self.strength)

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """The Fisher information and the base parameters are those of the current model."""
        import torch

        from cplus.evidence import borrowed_gradients, take_gradients
        from cplus.losses import answer_losses

        anchors, params = material.rows("anchors"), [p for p in model.parameters() if p.requires_grad]
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
                p.grad.addcmul_(f, moved, value=self.strength)
                loss += 0.5 * self.strength * float((f * moved * moved).sum())
            return loss, work

        return backward


def check_finite(loss: float, step: int) -> None:
    """Stop before a non-finite loss reaches the parameters."""
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss is {loss} at step {step}; the parameters are unchanged. Lower the learning rate, clip the "
            "gradient or check the batch"
        )
