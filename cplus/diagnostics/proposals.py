"""An optimizer's proposals, computed one tensor at a time without taking the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cplus.data.encoded import Encoded
from cplus.evidence import borrowed_gradients
from cplus.losses import answer_losses
from cplus.objectives import mean_backward
from cplus.support import trainable


def propose(optimizer: Optimizer, p: nn.Parameter, *, advance: bool = False) -> Tensor:
    """The value the optimizer would give one parameter, which is not changed; `advance` updates its optimizer state.

    A copy of the optimizer, without its hooks, steps a copy of this parameter alone.
    """
    if p.grad is None:
        return p.detach()
    copied = nn.Parameter(p.detach().clone())
    copied.grad = p.grad
    state = optimizer.state.get(p, {})
    [group] = [group for group in optimizer.param_groups if any(q is p for q in group["params"])]
    twin = type(optimizer).__new__(type(optimizer))
    twin.__setstate__(
        {
            "defaults": dict(optimizer.defaults),
            "param_groups": [{**group, "params": [copied]}],
            "state": defaultdict(dict, {copied: state if advance else _cloned(state)} if state else {}),
        }
    )
    twin.step()
    if advance:
        optimizer.state[p] = twin.state[copied]
    return copied.detach()


def proposals(
    model: nn.Module, optimizer: Optimizer, rows: Sequence[Encoded], *, advance: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter's value and the value after one step on these rows, in the optimizer's order.

    The model's gradients and mode are restored after the last pair.
    """
    params = trainable(optimizer)
    with borrowed_gradients(model, params):
        mean_backward(model, rows, answer_losses)
        for p in params:
            proposed = propose(optimizer, p, advance=advance)
            p.grad = None
            yield p.detach(), proposed


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
