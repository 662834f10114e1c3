"""Objectives: the scalar whose gradient the optimizer sees, from new rows and past rows.

Each function is bound to the model as it is before the first update and to the material of a training, and returns a
function that adds one batch's gradient to `.grad` and returns its loss and work.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from cplus.base.cost import Work
from cplus.core.engine import Engine, engine_of
from cplus.core.evidence import Source, evaluating
from cplus.core.losses import answer_losses, divergence_at, divergences, target_logits, token_losses
from cplus.core.rows import MAX_TOKENS, Encoded, batched, like_length, measured
from cplus.distributed import processes
from cplus.methods.curvature import squared_gradients
from cplus.methods.table import Material

Backward: TypeAlias = Callable[[Sequence[Encoded]], tuple[float, Work]]
Losses: TypeAlias = Callable[[nn.Module, Sequence[Encoded]], Tensor]


def mean_backward(model: nn.Module, rows: Sequence[Encoded], losses: Losses, weight: float = 1.0) -> tuple[float, Work]:
    """Add the gradient of `weight` times the rows' mean loss, in passes of bounded memory."""
    total, work = 0.0, Work()
    for part in batched(rows):
        loss = losses(model, part).sum() * (weight / len(rows))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        work += measured(part)
    return total, work


def spread_backward(model: nn.Module, rows: Sequence[Encoded], losses: Losses) -> tuple[float, Work]:
    """`mean_backward` with the passes split over the processes of a job: every one gets the gradient of all rows."""
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
    params, engine = [p for p in model.parameters() if p.requires_grad], Engine(model)

    def mean(rows: Sequence[Encoded]) -> tuple[float, Work]:
        loss, work = backward(rows)
        for gradient in engine.total([p.grad for p in params if p.grad is not None]):
            gradient.div_(engine.world)
        return engine.sums([loss], params[0].device)[0] / engine.world, work

    return mean


def answers(model: nn.Module, material: Material) -> Backward:
    """The answers' cross-entropy: SFT's objective, the mean over rows of each row's mean token loss."""
    step = spread_backward if processes.size() > 1 else mean_backward
    return lambda rows: step(model, rows, answer_losses)


def check_finite(loss: float, step: int) -> None:
    """Stop before a non-finite loss reaches the parameters."""
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss is {loss} at step {step}; the parameters are unchanged. Lower the learning rate, clip the "
            "gradient or check the batch"
        )


# Objectives that hold the model to the frozen model: its predictions on some rows, or its weights.


def frozen_copy(model: nn.Module) -> nn.Module:
    """The frozen model: a copy of the current one, 4 bytes per parameter in float32."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def distillation(model: nn.Module, material: Material, strength: float) -> Backward:
    """The answers' cross-entropy plus `strength` times KL(frozen || model) on the anchors.

    Source: Hinton et al. 2015; the strength is ours (docs/interpretations.md).
    """
    moved, anchors = _from_base(model), material.rows("anchors")

    def backward(rows: Sequence[Encoded]) -> tuple[float, Work]:
        loss, work = mean_backward(model, rows, answer_losses)
        extra, passed = mean_backward(model, anchors, moved, strength)
        return loss + extra, work + passed + Work(forward=passed.padded)

    return backward


def replayed_distillation(model: nn.Module, material: Material, strength: float) -> Backward:
    """Cross-entropy on the new rows of a batch, `strength` times KL(frozen || model) on its probes.

    Source: Hinton et al. 2015; the batches are those of probe replay, so that every probe is seen once per epoch. A row
    that is both new and a probe counts as new.
    """
    return _beside(model, material, strength, _from_base(model), frozen=True, one_mean=True)


def kept_answers(model: nn.Module, material: Material, strength: float) -> Backward:
    """The new rows' cross-entropy plus `strength` times that of the kept rows of the batch, a mean over each."""
    return _beside(model, material, strength, answer_losses)


def kept_divergence(model: nn.Module, material: Material, strength: float) -> Backward:
    """The new rows' cross-entropy plus `strength` times KL(base || model) at the tokens of the batch's kept rows.

    The base model's outputs at the kept rows are computed once, here, where they are smaller than the model; else a
    frozen copy reads each kept row again.
    """
    rows, size = list(dict.fromkeys(material.rows("beginnings"))), sum(p.numel() for p in model.parameters())
    known: dict[Encoded, Tensor] = {}
    with evaluating(model), torch.no_grad():
        for part in batched(rows):
            logits, labels = target_logits(model, part)
            if sum(row.num_scored for row in rows) * logits.shape[-1] > size:
                break
            known.update({row: own[where] for row, own, where in zip(part, logits, labels != -100, strict=True)})
    if len(known) < len(rows):
        return _beside(model, material, strength, _from_base(model), frozen=True)

    def losses(own: nn.Module, part: Sequence[Encoded]) -> Tensor:
        logits, labels = target_logits(own, part)
        inside, teacher = labels != -100, torch.zeros_like(logits)
        teacher[inside] = torch.cat([known[row] for row in part])
        return (divergence_at(teacher, logits) * inside).sum(1) / inside.sum(1)

    return _beside(model, material, strength, losses)


def _from_base(model: nn.Module) -> Losses:
    """The divergence from the model as it is now, which is copied."""
    frozen = frozen_copy(model)
    return lambda own, part: divergences(own, frozen, part)


def _beside(
    model: nn.Module,
    material: Material,
    strength: float,
    losses: Losses,
    *,
    frozen: bool = False,
    one_mean: bool = False,
) -> Backward:
    """The mean answer loss of a batch's new rows plus `strength` times the mean of these losses over its other rows.

    With `one_mean` it is one mean over all rows. `frozen` says that the frozen model reads the other rows too.
    """
    new = set(material.new)

    def backward(rows: Sequence[Encoded]) -> tuple[float, Work]:
        learned, kept = [row for row in rows if row in new], [row for row in rows if row not in new]
        weights = len(learned) / len(rows), strength * len(kept) / len(rows)
        own, other = weights if one_mean else (1.0, strength)
        loss, work = mean_backward(model, learned, answer_losses, own)
        extra, passed = mean_backward(model, kept, losses, other)
        return loss + extra, work + passed + Work(forward=passed.padded * frozen)

    return backward


def held_to_base(
    model: nn.Module, material: Material, strength: float, weigh: Callable[[Tensor], Tensor] = torch.ones_like
) -> Backward:
    """The new rows' loss plus `strength` times KL(frozen || model) at the same tokens.

    Source: Zhu et al. 2025, ASFT.    mean over tokens of (w * loss + strength * KL), w by `weigh` from the loss
    """
    frozen = frozen_copy(model)

    def losses(own: nn.Module, rows: Sequence[Encoded]) -> Tensor:
        with torch.no_grad():
            teacher, _ = target_logits(frozen, rows)
        logits, each, inside = token_losses(own, rows)
        each = each * weigh(each.detach()) + strength * divergence_at(teacher, logits)
        return (each * inside).sum(1) / inside.sum(1)

    def backward(rows: Sequence[Encoded]) -> tuple[float, Work]:
        loss, work = mean_backward(model, rows, losses)
        return loss, work + Work(forward=work.padded)

    return backward


def asft(model: nn.Module, material: Material, strength: float) -> Backward:
    """`held_to_base`, and a token counts as much as the model already expects it.

    Source: Wu et al. 2025, DFT.    w = p(token)
    """
    return held_to_base(model, material, strength, lambda losses: (-losses).exp())


def elastic_weights(model: nn.Module, material: Material, strength: float) -> Backward:
    """The answers' cross-entropy plus EWC's penalty, with the anchors' empirical Fisher at the base model.

    Source: Kirkpatrick et al. 2017, Eq. 3.    L + strength / 2 * sum_i F_i (theta_i - theta0_i)^2

    The penalty's gradient is added in closed form; F is the mean over anchors of the squared gradient.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    base = [p.detach().clone() for p in params]
    anchors = Source(name="anchors", weight=1.0, rows=material.rows("anchors"))
    fisher = squared_gradients(model, (anchors,), params, 0)[0]

    def backward(rows: Sequence[Encoded]) -> tuple[float, Work]:
        loss, work = mean_backward(model, rows, answer_losses)
        penalty = torch.zeros((), dtype=torch.float64, device=base[0].device)
        for p, f, b in zip(params, fisher, base, strict=True):
            assert p.grad is not None
            moved = p.detach() - b
            p.grad.addcmul_(f, moved, value=strength)
            penalty += (f * moved * moved).sum().to(penalty.device)
        return loss + 0.5 * strength * float(penalty), work

    return backward


# Objectives that change what the new rows' tokens count for.


TOP = 20
FLOOR = 0.01


def entropic(model: nn.Module, material: Material, strength: float) -> Backward:
    """Token losses weighted by the model's uncertainty: where it is sure of another token, little is learned.

    Source: Diao et al. 2026, EAFT.    mean over tokens of (H(top 20, renormalised) / ln 20)^strength * loss
    """

    def losses(own: nn.Module, rows: Sequence[Encoded]) -> Tensor:
        logits, each, inside = token_losses(own, rows)
        count = min(TOP, logits.shape[-1])
        chances = logits.detach().topk(count, dim=-1).values.log_softmax(-1)
        entropy = -(chances.exp() * chances).sum(-1) / math.log(count)
        return (each * entropy**strength * inside).sum(1) / inside.sum(1)

    return lambda rows: mean_backward(model, rows, losses)


def tempered(model: nn.Module, material: Material, strength: float) -> Backward:
    """Token losses weighted by how easy the token is, relative to the batch.

    Source: Lin et al. 2025, TALR.    w = max(exp(-loss / tau), 0.01), divided by its mean over the batch's tokens

    tau is `strength` times the mean over the batch's rows of their losses. A batch of more than one pass is read once
    more before, because the weights depend on all of it.
    """

    def easy(losses: Tensor, tau: float) -> Tensor:
        return (-losses / tau).exp().clamp(min=FLOOR)

    def scale(losses: list[Tensor]) -> tuple[float, float]:
        """The temperature, and the mean weight, of a batch's rows of token losses."""
        means = torch.stack([own.mean() for own in losses])
        tau = max(strength * float(means.mean()), torch.finfo(torch.float32).tiny)
        return tau, float(torch.cat([easy(own, tau) for own in losses]).mean())

    def backward(rows: Sequence[Encoded]) -> tuple[float, Work]:
        known, work, parts = None, Work(), list(batched(rows))
        if len(parts) > 1:
            with torch.no_grad():
                read = [token_losses(model, part)[1:] for part in parts]
            known = scale([own[where] for both in read for own, where in zip(*both, strict=True)])
            work = Work(forward=sum(measured(part).padded for part in parts))

        def losses(own: nn.Module, part: Sequence[Encoded]) -> Tensor:
            _, each, inside = token_losses(own, part)
            now = each.detach()
            tau, mean = known or scale([row[where] for row, where in zip(now, inside, strict=True)])
            return (each * easy(now, tau) / mean * inside).sum(1) / inside.sum(1)

        loss, passed = mean_backward(model, rows, losses)
        return loss, work + passed

    return backward


def masked(model: nn.Module, material: Material, strength: float) -> Backward:
    """The answers' cross-entropy without the tokens that surprise the base model.

    Source: Wu et al. 2025, STM.    tokens with exp(loss at the base model) > strength are not learned

    A row keeps at least the token that surprises the base model least: without any it would have no loss.
    """
    learned = {}
    for row, losses in base_losses(model, material.new).items():
        limit = max(math.log(strength), min(losses))
        scored = iter(loss <= limit for loss in losses)
        learned[row] = Encoded(row.prompt, row.target, tuple(label != -100 and next(scored) for label in row.labels))
    return lambda rows: mean_backward(model, [learned[row] for row in rows], answer_losses)


def easy_rows(model: nn.Module, material: Material, strength: float) -> Backward:
    """The answers' cross-entropy with rows weighted by how easy the base model finds them.

    Source: Sanyal et al. 2025, FLOW, Algorithm 1.    w = exp(-loss0 / tau), tau = strength * median of loss0
    """
    found = {row: statistics.fmean(losses) for row, losses in base_losses(model, material.new).items()}
    tau = max(strength * statistics.median(found[row] for row in material.new), 1e-12)

    def losses(own: nn.Module, rows: Sequence[Encoded]) -> Tensor:
        each = answer_losses(own, rows)
        return each * each.new_tensor([math.exp(-found[row] / tau) for row in rows])

    return lambda rows: mean_backward(model, rows, losses)


def base_losses(model: nn.Module, rows: Sequence[Encoded]) -> dict[Encoded, list[float]]:
    """The losses of each row's scored tokens at the model as it is, without dropout."""
    found = {}
    with evaluating(model), torch.no_grad():
        for part in batched(rows):
            _, losses, inside = token_losses(model, part)
            found.update({row: own[where].tolist() for row, own, where in zip(part, losses, inside, strict=True)})
    return found
