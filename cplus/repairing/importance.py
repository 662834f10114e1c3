"""How much rows depend on each weight: the mean squared gradient, example by example, or the mean gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cplus.data.batching import batched
from cplus.data.encoded import Encoded
from cplus.evidence import borrowed_gradients
from cplus.losses import answer_losses

Computing = Callable[[], AbstractContextManager[object]]
"""Opens the context of one pass, such as autocast; it is opened anew for each pass because the weights change."""


@dataclass(kw_only=True)
class Sums:
    """Gradients, squared or not, of the first `rows` rows, summed: one float32 tensor per parameter."""

    tensors: list[Tensor]
    rows: int = 0

    @staticmethod
    def zeros(params: Sequence[nn.Parameter]) -> Sums:
        """Nothing summed yet."""
        return Sums(tensors=[torch.zeros_like(p, dtype=torch.float32) for p in params])

    def means(self) -> list[Tensor]:
        """The means in place of the sums, which are not needed any more; a weight that is not a number is an error."""
        norms = torch.stack([total.sum() for total in self.tensors])
        if not bool(torch.isfinite(norms).all()):
            raise FloatingPointError(
                "the gradients are not finite: a model's weights or its loss on a row are not numbers; check "
                "both models with 'cplus evaluate'"
            )
        return [total.div_(self.rows) for total in self.tensors]


def add_gradients(
    model: nn.Module,
    rows: Sequence[Encoded],
    params: Sequence[nn.Parameter],
    sums: Sums,
    *,
    squared: bool = True,
    computing: Computing = nullcontext,
    after: Callable[[Sums], None] = lambda sums: None,
) -> Sums:
    """Add what is not summed yet: each row's squared gradient, row by row, or the gradient, batch by batch.

    F[j] = mean_i (d loss_i / d theta_j)^2, loss_i the mean cross-entropy over the target tokens of row i

    A gradient is added and freed as soon as it is complete, so that at most one tensor's is held at a time; `after` is
    called after each pass.
    """
    done = 0
    with borrowed_gradients(model, params), _only_these(model, params), _taken(params, sums.tensors, squared=squared):
        for batch in ([row] for row in rows) if squared else batched(rows):
            done += len(batch)
            if done <= sums.rows:
                continue
            with computing():
                loss = answer_losses(model, batch).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            sums.rows = done
            after(sums)
    return sums


@contextmanager
def _only_these(model: nn.Module, params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Only these parameters have gradients inside; merged adapters leave a model frozen."""
    before = [(p, p.requires_grad) for p in model.parameters()]
    wanted = {id(p) for p in params}
    for p, _ in before:
        p.requires_grad_(id(p) in wanted)
    try:
        yield
    finally:
        for p, required in before:
            p.requires_grad_(required)


@contextmanager
def _taken(params: Sequence[nn.Parameter], totals: Sequence[Tensor], *, squared: bool) -> Iterator[None]:
    """Add each gradient, or its square, to its total as soon as it is complete, and free it."""

    def taking(total: Tensor) -> Callable[[Tensor], None]:
        def hook(p: Tensor) -> None:
            assert p.grad is not None
            gradient = p.grad.float()
            total.addcmul_(gradient, gradient) if squared else total.add_(gradient)
            p.grad = None

        return hook

    own: list[Any] = list(params)  # torch leaves the next call without types
    hooks = [p.register_post_accumulate_grad_hook(taking(total)) for p, total in zip(own, totals, strict=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
