"""The cross-entropy at answer positions, and the divergence from the frozen model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from cplus.core.engine import inside
from cplus.core.rows import Encoded, shared_prefix


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """Rows of tokens as one left-padded batch: ids, attention mask and position ids.

    >>> left_padded([(5, 6), (7,)], torch.device("cpu"))["position_ids"].tolist()
    [[0, 1], [0, 0]]
    """
    ids, mask = _padded(rows, 0), _padded([[1] * len(row) for row in rows], 0)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_(min=0)}
    return {name: own.to(device) for name, own in batch.items()}


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side="left")


def last_logits(model: nn.Module, batch: dict[str, Tensor], keep: int) -> Tensor:
    """The logits at the last `keep` positions, without computing all `T x V` if the model supports that."""
    # The wrappers of PEFT and DeepSpeed hide the keyword behind **kwargs and forward it.
    base = inside(model)
    base = getattr(base, "get_base_model", lambda: base)()
    if "logits_to_keep" in inspect.signature(type(base).forward).parameters:
        return model(**batch, use_cache=False, logits_to_keep=keep).logits.float()  # type: ignore[no-any-return]
    return model(**batch, use_cache=False).logits[:, -keep:].float()  # type: ignore[no-any-return]


def target_logits(model: nn.Module, rows: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    """The logits that predict each row's target, and the target ids, both aligned at the end; -100 marks no target."""
    batch, labels = _targets(model, rows)
    return last_logits(model, batch, labels.shape[1]), labels


def _targets(model: nn.Module, rows: Sequence[Encoded]) -> tuple[dict[str, Tensor], Tensor]:
    """The model's inputs, and the targets it must predict at the last positions."""
    device = next(model.parameters()).device
    # The last target token is only predicted, so it is not an input.
    batch = left_padded([(*row.prompt, *row.target[:-1]) for row in rows], device)
    return batch, _padded([row.labels for row in rows], -100).to(device)


def answer_losses(model: nn.Module, rows: Sequence[Encoded]) -> Tensor:
    """Each example's loss: the mean cross-entropy over its target tokens, full vocabulary.

    Paper: l in App. C.4; protocol section 1.
    """
    return _mean_over_targets(*target_logits(model, rows))


def _mean_over_targets(logits: Tensor, labels: Tensor) -> Tensor:
    return at_targets(logits, labels).sum(1) / (labels != -100).sum(1)


def at_targets(logits: Tensor, labels: Tensor) -> Tensor:
    """Each target token's cross-entropy, 0 where no token is scored."""
    token = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return token.view_as(labels)


def token_losses(model: nn.Module, rows: Sequence[Encoded]) -> tuple[Tensor, Tensor, Tensor]:
    """The logits, each target token's cross-entropy, and where there is a token that is scored."""
    logits, labels = target_logits(model, rows)
    return logits, at_targets(logits, labels), labels != -100


def shared_losses(model: nn.Module, rows: Sequence[Encoded]) -> Tensor:
    """`answer_losses` with the prompts' common prefix, such as a system text, processed once.

    Only for passes without dropout: the rows share the activations of the prefix, and its gradient is their sum.
    """
    prefix = shared_prefix([row.prompt for row in rows])
    if not prefix or not _shares_prefix(model, max(map(len, rows))):
        return answer_losses(model, rows)
    rest = [Encoded(row.prompt[len(prefix) :], row.target, row.scored) for row in rows]
    ids = torch.tensor([prefix], device=next(model.parameters()).device)
    past = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    past.batch_repeat_interleave(len(rows))
    batch, labels = _targets(model, rest)
    batch["attention_mask"] = F.pad(batch["attention_mask"], (len(prefix), 0), value=1)
    batch["position_ids"] = batch["position_ids"] + len(prefix)
    logits = model(**batch, past_key_values=past, use_cache=True, logits_to_keep=labels.shape[1]).logits.float()
    return _mean_over_targets(logits, labels)


def _shares_prefix(model: nn.Module, longest: int) -> bool:
    """Whether continuing from cached keys and values, with gradients, equals processing the whole text."""
    config = getattr(model, "config", None)
    arguments = inspect.signature(type(model).forward).parameters
    sliding = getattr(config, "sliding_window", None)
    return (
        config is not None
        and {"position_ids", "past_key_values", "logits_to_keep"} <= set(arguments)
        and not model.training
        and not getattr(model, "is_gradient_checkpointing", False)
        and not getattr(model, "_is_stateful", False)
        and not getattr(config, "alibi", False)
        and (sliding is None or longest <= sliding)
        # A second pass through sharded layers would gather them a second time, so a job that could be sharded has none.
        and type(next(model.parameters())) is nn.Parameter
        and not torch.distributed.is_initialized()
    )


def divergences(model: nn.Module, frozen: nn.Module, rows: Sequence[Encoded]) -> Tensor:
    """Each example's mean KL(frozen || model) over the target positions, for distillation from the frozen model."""
    with torch.no_grad():
        teacher, _ = target_logits(frozen, rows)
    logits, labels = target_logits(model, rows)
    inside = labels != -100
    return (divergence_at(teacher, logits) * inside).sum(1) / inside.sum(1)


def divergence_at(teacher: Tensor, logits: Tensor) -> Tensor:
    """KL(teacher || model) at every position, from the logits of both."""
    kl = F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none")
    return kl.sum(-1)
