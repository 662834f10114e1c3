"""One model on one task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cplus.data.examples import Choice, Example, Prediction
from cplus.data.interfaces import Interface
from cplus.evaluation.changes import answered
from cplus.evaluation.judges import Judge
from cplus.models.scoring import log_likelihoods, predict

# The evaluation of one model on one task.


def evaluate_task(
    model: nn.Module,
    interface: Interface,
    examples: Sequence[Example],
    *,
    judge: Judge | None,
    name: str,
    max_new_tokens: int = 256,
) -> tuple[list[Prediction], dict[str, Any]]:
    """The model's answers and their summary; free-form rows are also scored by the likelihood of their responses."""
    predictions = predict(model, interface, examples, judge=judge, max_new_tokens=max_new_tokens, what=name)
    summary = {"task": name, "interface": interface.name, **answered(predictions, examples)}
    if not isinstance(examples[0], Choice):
        encoded = [interface.encode(example) for example in examples]
        scores = log_likelihoods(model, encoded, what=f"{name}: responses")
        total, tokens = sum(score.total for score in scores), sum(score.num_tokens for score in scores)
        summary["responses"] = {
            "tokens": tokens,
            "log_likelihood_per_token": total / tokens,
            "perplexity": math.exp(-total / tokens),
            "log_likelihood_per_response": total / len(scores),
        }
    return predictions, summary


# What rounding alone changes: the scale of a divergence.


def to_bfloat16(weight: Tensor) -> Tensor:
    """The weights as bfloat16 stores them."""
    return weight.bfloat16().to(weight.dtype)


def to_q8_0(weight: Tensor) -> Tensor:
    """The weights as GGUF's Q8_0 stores them: 32 at a time, as 8-bit multiples of their largest one.

    >>> to_q8_0(torch.tensor([[127.0, 1.4]]))
    tensor([[127.,   1.]])
    """
    blocks = weight.reshape(-1, 32) if weight.shape[-1] % 32 == 0 else weight
    step = (blocks.abs().amax(-1, keepdim=True) / 127).half().to(weight.dtype)
    return (step * (blocks / step.clamp_min(torch.finfo(torch.float16).tiny)).round()).view_as(weight)


@contextmanager
def rounded(model: nn.Module, store: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Compute with rounded matrices; one at a time is held twice."""
    whole: dict[nn.Module, Tensor] = {}

    def enter(module: Any, inputs: Any) -> None:
        whole[module], module.weight.data = module.weight.data, store(module.weight.data)

    def leave(module: Any, inputs: Any, output: Any) -> None:
        module.weight.data = whole.pop(module)

    kinds = (nn.Linear, nn.Embedding)
    some = [own for own in model.modules() if isinstance(own, kinds) and own.weight.is_floating_point()]
    hooks = [hook for own in some for hook in (own.register_forward_pre_hook(enter), own.register_forward_hook(leave))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
