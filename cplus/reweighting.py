"""Objectives that change what the new rows' tokens count for, or hold the model's predictions to the frozen model's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cplus.cost import Work
from cplus.data.batching import batched, measured
from cplus.data.encoded import Encoded
from cplus.data.material import Material, Rows
from cplus.objectives import Backward, check_strength, copied, mean_backward

if TYPE_CHECKING:  # the table of methods is read without torch
    from torch import Tensor, nn

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
class Entropic:
    """Token losses weighted by the model's uncertainty: where it is sure of another token, little is learned.

    Source: Diao et al. 2026, EAFT.    mean over tokens of (H(top 20) / ln 20)^strength * loss
    """

    strength: float = 1.0
    needs: tuple[Rows, ...] = ()
    bytes_per_parameter: float = 0.0
    anchor_passes: float = 0.0
    read_by_base: tuple[Rows, ...] = ()

    def __post_init__(self) -> None:
        check_strength(self.strength)

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """Past rows are not used."""

        def losses(own: nn.Module, rows: Sequence[Encoded]) -> Tensor:
            return weighted(own, rows, lambda logits, each: top_entropy(logits, each) ** self.strength)

        return lambda rows: mean_backward(model, rows, losses)


@dataclass(frozen=True)
class Tempered:
    """Token losses weighted by how easy the token is, relative to the batch.

    Source: Lin et al. 2025, TALR.    w = max(exp(-loss / tau), 0.01), divided by its mean over the batch's tokens

    tau is `strength` times the mean over the batch's rows of their losses. A batch of more than one pass is read once
    more before, because the weights depend on all of it.
    """

    strength: float = 1.0
    needs: tuple[Rows, ...] = ()
    bytes_per_parameter: float = 0.0
    anchor_passes: float = 0.0
    read_by_base: tuple[Rows, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.strength < math.inf:
            raise ValueError(f"the strength of a temperature must be above 0, got {self.strength}")

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """Past rows are not used."""
        import torch

        from cplus.losses import token_losses

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
class Masked:
    """The answers' cross-entropy without the tokens that surprise the base model.

    Source: Wu et al. 2025, STM.    tokens with exp(loss at the base model) > strength are not learned

    A row keeps at least the token that surprises the base model least: without any it would have no loss.
    """

    strength: float = 2.5
    needs: tuple[Rows, ...] = ()
    bytes_per_parameter: float = 0.0
    anchor_passes: float = 0.0
    read_by_base: tuple[Rows, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.strength < math.inf:
            raise ValueError(f"the strength of token masking is a perplexity above 0, got {self.strength}")

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """One forward pass over the new rows at the base model."""
        from cplus.losses import answer_losses

        limit, learned = math.log(self.strength), {}
        for row, losses in base_losses(model, material.new).items():
            least = min(losses)
            scored = iter(loss <= max(limit, least) for loss in losses)
            learned[row] = Encoded(
                row.prompt, row.target, tuple(next(scored) if label != -100 else False for label in row.labels)
            )
        return lambda rows: mean_backward(model, [learned[row] for row in rows], answer_losses)


@dataclass(frozen=True)
class EasyRows:
    """The answers' cross-entropy with rows weighted by how easy the base model finds them.

    Source: Sanyal et al. 2025, FLOW, Algorithm 1.    w = exp(-loss0 / tau), tau = strength * median of loss0
    """

    strength: float = 1.0
    needs: tuple[Rows, ...] = ()
    bytes_per_parameter: float = 0.0
    anchor_passes: float = 0.0
    read_by_base: tuple[Rows, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.strength < math.inf:
            raise ValueError(f"the strength of a temperature must be above 0, got {self.strength}")

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """One forward pass over the new rows at the base model."""
        from cplus.losses import answer_losses

        found = {row: statistics.fmean(losses) for row, losses in base_losses(model, material.new).items()}
        tau = max(self.strength * statistics.median(found[row] for row in material.new), 1e-12)
        weights = {row: math.exp(-loss / tau) for row, loss in found.items()}

        def losses(own: nn.Module, rows: Sequence[Encoded]) -> Tensor:
            each = answer_losses(own, rows)
            return each * each.new_tensor([weights[row] for row in rows])

        return lambda rows: mean_backward(model, rows, losses)


@dataclass(frozen=True)
class HeldToBase:
    """The new rows' loss plus `strength` times KL(frozen || model) at the same tokens.

    Source: Zhu et al. 2025, ASFT.    mean over tokens of (w * loss + strength * KL), w by `weigh`
    """

    strength: float
    weigh: Weigh = alike
    needs: tuple[Rows, ...] = ()
    bytes_per_parameter: float = 4.0
    anchor_passes: float = 0.0
    read_by_base: tuple[Rows, ...] = ("new",)

    def __post_init__(self) -> None:
        check_strength(self.strength)

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """The frozen model is a copy of the current one."""
        import torch

        from cplus.losses import divergence_at, target_logits, token_losses

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
class ReplayedDistillation:
    """Cross-entropy on the new rows of a batch, `strength` times KL(frozen || model) on its probes.

    Source: Hinton et al. 2015; the batches are those of probe replay, so that every probe is seen once per epoch.
    """

    strength: float = 1.0
    needs: tuple[Rows, ...] = ("probes",)
    bytes_per_parameter: float = 4.0
    anchor_passes: float = 0.0
    read_by_base: tuple[Rows, ...] = ("probes",)

    def __post_init__(self) -> None:
        check_strength(self.strength)

    def __call__(self, model: nn.Module, material: Material) -> Backward:
        """The frozen model is a copy of the current one; a row that is both new and a probe counts as new."""
        from cplus.losses import answer_losses, divergences

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
    from cplus.losses import token_losses

    logits, losses, inside = token_losses(model, rows)
    return (losses * weigh(logits.detach(), losses.detach()) * inside).sum(1) / inside.sum(1)


def base_losses(model: nn.Module, rows: Sequence[Encoded]) -> dict[Encoded, list[float]]:
    """The losses of each row's scored tokens at the model as it is, without dropout."""
    import torch

    from cplus.losses import token_losses

    found, training = {}, model.training
    model.eval()
    for part in batched(rows):
        with torch.no_grad():
            _, losses, inside = token_losses(model, part)
        found.update({row: own[where].tolist() for row, own, where in zip(part, losses, inside, strict=True)})
    model.train(training)
    return found
