"""Objectives: the scalar whose gradient the optimizer sees, from new rows and past rows."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cplus.base.cost import Work
from cplus.core.rows import MAX_TOKENS, Encoded, batched, like_length, measured
from cplus.distributed import processes

if TYPE_CHECKING:
    from torch import Tensor, nn


# The rows of a training, by what they are for: new rows to learn, and each past task's rows.


Rows: TypeAlias = Literal["new", "anchors", "probes", "synthetic", "constant", "balanced"]
"""The kinds of rows."""
BANK: frozenset[Rows] = frozenset({"probes", "synthetic", "constant", "balanced"})
"""The kinds of rows that come from the bank."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """The rows of one past task.

    `synthetic` are probes answered again by the latest model. `constant` and `balanced` are controls: probes that all
    have the same answer, and probes in which no answer has more than its even share.
    """

    name: str
    anchors: Sequence[Encoded] = ()
    probes: Sequence[Encoded] = ()
    synthetic: Sequence[Encoded] = ()
    constant: Sequence[Encoded] = ()
    balanced: Sequence[Encoded] = ()

    def rows(self, kind: Rows) -> Sequence[Encoded]:
        """The rows of one kind."""
        assert kind != "new", "new rows belong to no past task"
        rows: Sequence[Encoded] = getattr(self, kind)
        return rows


@dataclass(frozen=True, kw_only=True)
class Material:
    """New data to learn and the past tasks to keep."""

    new: Sequence[Encoded]
    past: tuple[Past, ...] = ()
    choices: Mapping[Encoded, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """The tokens of every choice of a new row, its target among them, where the row has choices."""

    def __post_init__(self) -> None:
        if not self.new:
            raise ValueError("there is no new data to learn: expected at least one new row, got none")

    def rows(self, kind: Rows) -> list[Encoded]:
        """The rows of one kind over all past tasks."""
        return list(self.new) if kind == "new" else [row for past in self.past for row in past.rows(kind)]


# Objectives: the scalar whose gradient the optimizer sees.


Backward: TypeAlias = Callable[[Sequence[Encoded]], tuple[float, Work]]


class Build:
    """Binds an objective to a model and to the rows that it uses besides the batch."""

    needs: tuple[Rows, ...] = ()
    """The kinds of past rows it requires."""
    bytes_per_parameter: float = 0.0
    """The memory it holds besides the model when training in float32."""
    anchor_passes: float = 0.0
    """Forward-and-backward passes over the anchors per update; a forward pass alone counts one third."""
    read_by_base: tuple[Rows, ...] = ()
    """The kinds of trained rows that the frozen model reads too: one more forward pass each."""

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """A function that adds one batch's gradient to `.grad` and returns its loss and work."""
        raise NotImplementedError


class Strength:
    """A part of a method with one number to choose, `strength`, which is set by the setting of that name."""

    strength: float
    within: str = "[0, inf)"

    def __post_init__(self) -> None:
        low, high = map(float, self.within[1:-1].split(","))
        above = self.strength > low or (self.strength == low and self.within[0] == "[")
        if not above or not (self.strength < high or (self.strength == high and self.within[-1] == "]")):
            raise ValueError(f"the strength of {type(self).__name__} must lie in {self.within}, got {self.strength}")


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
    import torch

    from cplus.core.engine import engine_of

    params = [p for p in model.parameters() if p.requires_grad]
    engine, device, total, work = engine_of(model, params), params[0].device, 0.0, Work()
    batches = list(like_length(rows, MAX_TOKENS, engine.world))
    first = int(torch.randint(2**62, ()))  # the same in all processes
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        torch.manual_seed(first + engine.rank)  # no two processes drop the same values
        for items, weight, _ in engine.turns(batches):
            part = [rows[item] for item in items]
            loss = losses(model, part).sum() / len(rows)
            (loss * (weight * engine.averaging)).backward()  # type: ignore[no-untyped-call]
            if weight:
                total, work = total + float(loss.detach()), work + measured(part)
    engine.total([p.grad for p in params if p.grad is not None])
    total, *counts = engine.sums([total, work.rows, work.tokens, work.padded], device)
    return total, Work(rows=int(counts[0]), tokens=int(counts[1]), padded=int(counts[2]))


def averaged(backward: Backward, model: nn.Module) -> Backward:
    """An objective that needs the whole batch: every process computes it, and all continue with the same mean."""
    from cplus.core.engine import Engine

    params, engine = [p for p in model.parameters() if p.requires_grad], Engine(model)

    def mean(rows: Sequence[Encoded]) -> tuple[float, Work]:
        loss, work = backward(rows)
        for gradient in engine.total([p.grad for p in params if p.grad is not None]):
            gradient.div_(engine.world)
        return engine.sums([loss], params[0].device)[0] / engine.world, work

    return mean


def splits(objective: object) -> bool:
    """Whether processes can share a batch of this objective, inside any wrappers, row by row."""
    while hasattr(objective, "inner"):
        objective = objective.inner
    return isinstance(objective, Answers)


@dataclass(frozen=True)
class Answers(Build):
    """The answers' cross-entropy: SFT's objective, the mean over rows of each row's mean token loss."""

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """Past rows are not used."""
        from cplus.core.losses import answer_losses

        if processes.size() > 1:
            return lambda rows: spread_backward(model, rows, answer_losses)
        return lambda rows: mean_backward(model, rows, answer_losses)


answers = Answers()


def copied(model: nn.Module) -> nn.Module:
    """The frozen model: a copy of the current one, 4 bytes per parameter in float32."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def from_copy(model: nn.Module) -> Callable[[nn.Module, Sequence[Encoded]], Tensor]:
    """The divergence from a frozen copy of the model."""
    from cplus.core.losses import divergences

    frozen = copied(model)
    return lambda student, rows: divergences(student, frozen, rows)


def from_outputs(model: nn.Module, rows: Sequence[Encoded]) -> Callable[[nn.Module, Sequence[Encoded]], Tensor] | None:
    """The divergence from the model's outputs on these rows, kept batch by batch; None if they outweigh the model.

    With a letter as the answer they are one row of logits per anchor, where a copy of the model would not fit.
    """
    import torch

    from cplus.core.losses import divergences_from, target_logits

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
class Distillation(Strength, Build):
    """The answers' cross-entropy plus `strength` times KL(frozen || model) on the anchors.

    Source: Hinton et al. 2015; the strength is ours (docs/interpretations.md).
    """

    strength: float
    needs = ("anchors",)
    bytes_per_parameter = 4.0
    anchor_passes = 4 / 3  # the teacher's forward pass too

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """The frozen model is the current one; where they are smaller than it, its outputs are kept in its place."""
        from cplus.core.losses import answer_losses

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
class ElasticWeights(Strength, Build):
    """The answers' cross-entropy plus EWC's penalty, with the anchors' empirical Fisher at the base model.

    Source: Kirkpatrick et al. 2017, Eq. 3.    L + strength / 2 * sum_i F_i (theta_i - theta0_i)^2

    The penalty's gradient is added in closed form; F is the mean over anchors of the squared gradient.
    """

    strength: float
    needs = ("anchors",)
    bytes_per_parameter = 8.0

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """The Fisher information and the base parameters are those of the current model."""
        import torch

        from cplus.core.engine import engine_of
        from cplus.core.evidence import borrowed_gradients, taken
        from cplus.core.losses import answer_losses

        anchors, params = material.rows("anchors"), [p for p in model.parameters() if p.requires_grad]
        fisher, base = [torch.zeros_like(p) for p in params], [p.detach().clone() for p in params]
        with borrowed_gradients(model, params) as passes:
            for row in anchors:
                mean_backward(model, [row], answer_losses)
                for f, g in zip(fisher, taken(engine_of(model, params), params, passes), strict=True):
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


# Objectives that change what the new rows' tokens count for, or hold the model's predictions to the frozen model's.


Weigh: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""From logits and token losses to token weights; no gradient passes through them."""
TOP = 20
FLOOR = 0.01


def alike(logits: Tensor, losses: Tensor) -> Tensor:
    """Every token counts the same."""
    return losses.new_ones(losses.shape)


def own_probability(logits: Tensor, losses: Tensor) -> Tensor:
    """A token counts as much as the model already expects it.

    Source: Wu et al. 2025, DFT.    w = p(token)
    """
    return (-losses).exp()


def top_entropy(logits: Tensor, losses: Tensor) -> Tensor:
    """The entropy of the likeliest tokens' renormalised probabilities, as a share of its maximum.

    Source: Diao et al. 2026, EAFT.    w = H(top 20) / ln 20
    """
    count = min(TOP, logits.shape[-1])
    chances = logits.topk(count, dim=-1).values.log_softmax(-1)
    return -(chances.exp() * chances).sum(-1) / math.log(count)


@dataclass(frozen=True)
class Entropic(Strength, Build):
    """Token losses weighted by the model's uncertainty: where it is sure of another token, little is learned.

    Source: Diao et al. 2026, EAFT.    mean over tokens of (H(top 20) / ln 20)^strength * loss
    """

    strength: float = 1.0

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """Past rows are not used."""

        def losses(own: nn.Module, rows: Sequence[Encoded]) -> Tensor:
            return weighted(own, rows, lambda logits, each: top_entropy(logits, each) ** self.strength)

        return lambda rows: mean_backward(model, rows, losses)


@dataclass(frozen=True)
class Tempered(Strength, Build):
    """Token losses weighted by how easy the token is, relative to the batch.

    Source: Lin et al. 2025, TALR.    w = max(exp(-loss / tau), 0.01), divided by its mean over the batch's tokens

    tau is `strength` times the mean over the batch's rows of their losses. A batch of more than one pass is read once
    more before, because the weights depend on all of it.
    """

    strength: float = 1.0
    within = "(0, inf)"

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """Past rows are not used."""
        import torch

        from cplus.core.losses import token_losses

        def scale(losses: list[Tensor]) -> tuple[float, float]:
            """The temperature, and the mean weight, of a batch's rows of token losses."""
            means = torch.stack([own.mean() for own in losses])
            tau = max(self.strength * float(means.mean()), torch.finfo(torch.float32).tiny)
            return tau, float(torch.cat([_easy(own, tau) for own in losses]).mean())

        def backward(rows: Sequence[Encoded]) -> tuple[float, Work]:
            known: tuple[float, float] | None = None
            work = Work()
            if len(list(batched(rows))) > 1:
                found = []
                for part in batched(rows):
                    with torch.no_grad():
                        _, each, inside = token_losses(model, part)
                    found += [own[where] for own, where in zip(each, inside, strict=True)]
                    work += Work(forward=measured(part).padded)
                known = scale(found)

            def losses(own: nn.Module, part: Sequence[Encoded]) -> Tensor:
                _, each, inside = token_losses(own, part)
                rows_of = [row[where] for row, where in zip(each.detach(), inside, strict=True)]
                tau, mean = scale(rows_of) if known is None else known
                return (each * _easy(each.detach(), tau) / mean * inside).sum(1) / inside.sum(1)

            loss, passed = mean_backward(model, rows, losses)
            return loss, work + passed

        return backward


def _easy(losses: Tensor, tau: float) -> Tensor:
    return (-losses / tau).exp().clamp(min=FLOOR)


@dataclass(frozen=True)
class Masked(Strength, Build):
    """The answers' cross-entropy without the tokens that surprise the base model.

    Source: Wu et al. 2025, STM.    tokens with exp(loss at the base model) > strength are not learned

    A row keeps at least the token that surprises the base model least: without any it would have no loss.
    """

    strength: float = 2.5
    within = "(0, inf)"

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """One forward pass over the new rows at the base model."""
        from cplus.core.losses import answer_losses

        limit, learned = math.log(self.strength), {}
        for row, losses in base_losses(model, material.new).items():
            least = min(losses)
            scored = iter(loss <= max(limit, least) for loss in losses)
            learned[row] = Encoded(
                row.prompt, row.target, tuple(next(scored) if label != -100 else False for label in row.labels)
            )
        return lambda rows: mean_backward(model, [learned[row] for row in rows], answer_losses)


@dataclass(frozen=True)
class EasyRows(Strength, Build):
    """The answers' cross-entropy with rows weighted by how easy the base model finds them.

    Source: Sanyal et al. 2025, FLOW, Algorithm 1.    w = exp(-loss0 / tau), tau = strength * median of loss0
    """

    strength: float = 1.0
    within = "(0, inf)"

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """One forward pass over the new rows at the base model."""
        from cplus.core.losses import answer_losses

        found = {row: statistics.fmean(losses) for row, losses in base_losses(model, material.new).items()}
        tau = max(self.strength * statistics.median(found[row] for row in material.new), 1e-12)
        weights = {row: math.exp(-loss / tau) for row, loss in found.items()}

        def losses(own: nn.Module, rows: Sequence[Encoded]) -> Tensor:
            each = answer_losses(own, rows)
            return each * each.new_tensor([weights[row] for row in rows])

        return lambda rows: mean_backward(model, rows, losses)


@dataclass(frozen=True)
class HeldToBase(Strength, Build):
    """The new rows' loss plus `strength` times KL(frozen || model) at the same tokens.

    Source: Zhu et al. 2025, ASFT.    mean over tokens of (w * loss + strength * KL), w by `weigh`
    """

    strength: float
    weigh: Weigh = alike
    bytes_per_parameter = 4.0
    read_by_base = ("new",)

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """The frozen model is a copy of the current one."""
        import torch

        from cplus.core.losses import divergence_at, target_logits, token_losses

        frozen = copied(model)

        def losses(own: nn.Module, rows: Sequence[Encoded]) -> Tensor:
            with torch.no_grad():
                teacher, _ = target_logits(frozen, rows)
            logits, each, inside = token_losses(own, rows)
            each = each * self.weigh(logits.detach(), each.detach()) + self.strength * divergence_at(teacher, logits)
            return (each * inside).sum(1) / inside.sum(1)

        def backward(rows: Sequence[Encoded]) -> tuple[float, Work]:
            loss, work = mean_backward(model, rows, losses)
            return loss, work + Work(forward=work.padded)

        return backward


@dataclass(frozen=True)
class ReplayedDistillation(Strength, Build):
    """Cross-entropy on the new rows of a batch, `strength` times KL(frozen || model) on its probes.

    Source: Hinton et al. 2015; the batches are those of probe replay, so that every probe is seen once per epoch.
    """

    strength: float = 1.0
    needs = ("probes",)
    bytes_per_parameter = 4.0
    read_by_base = ("probes",)

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """The frozen model is a copy of the current one; a row that is both new and a probe counts as new."""
        from cplus.core.losses import answer_losses, divergences

        frozen, new = copied(model), set(material.new)

        def divergence(own: nn.Module, rows: Sequence[Encoded]) -> Tensor:
            return divergences(own, frozen, rows)

        def backward(rows: Sequence[Encoded]) -> tuple[float, Work]:
            learned, kept = [row for row in rows if row in new], [row for row in rows if row not in new]
            loss, work = 0.0, Work()
            if learned:
                loss, work = mean_backward(model, learned, answer_losses, len(learned) / len(rows))
            if kept:
                extra, passed = mean_backward(model, kept, divergence, self.strength * len(kept) / len(rows))
                loss, work = loss + extra, work + passed + Work(forward=passed.padded)
            return loss, work

        return backward


def weighted(model: nn.Module, rows: Sequence[Encoded], weigh: Weigh) -> Tensor:
    """Each row's mean over its target tokens of weight times loss."""
    from cplus.core.losses import token_losses

    logits, losses, inside = token_losses(model, rows)
    return (losses * weigh(logits.detach(), losses.detach()) * inside).sum(1) / inside.sum(1)


def base_losses(model: nn.Module, rows: Sequence[Encoded]) -> dict[Encoded, list[float]]:
    """The losses of each row's scored tokens at the model as it is, without dropout."""
    import torch

    from cplus.core.losses import token_losses

    found, training = {}, model.training
    model.eval()
    for part in batched(rows):
        with torch.no_grad():
            _, losses, inside = token_losses(model, part)
        found.update({row: own[where].tolist() for row, own, where in zip(part, losses, inside, strict=True)})
    model.train(training)
    return found
