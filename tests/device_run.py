"""Trainings on the host and on the pretend accelerator, in a process whose first backward pass knows the device."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import tiny
import torch
from fake_device import NAME, accelerator
from torch import Tensor
from torch.optim import SGD, Optimizer

from cplus.core.guard import protect
from cplus.core.losses import answer_losses

ANCHORS, PROBES, NEW = tiny.rows(4, seed=1), tiny.rows(6, seed=2), tiny.rows(8, seed=3)
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "loop": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "sgd": lambda params: SGD(params, lr=1e-1, momentum=0.9),
}


def trained(make: Callable[..., Optimizer], device: str, layers: int = 2) -> tuple[list[Tensor], list[Counter[str]]]:
    """The weights after six updates with a refresh before every third, and what each part of the work counted."""
    with accelerator() as counts:
        model = tiny.lm(layers=layers)
        model.set_attn_implementation("eager")  # the one form of attention that every device computes alike
        model.to(device).tie_weights()  # tensors of another kind are new parameters, where a GPU's keep theirs
        optimizer = make(model.parameters())
        guard = protect(optimizer, model, anchors=ANCHORS, probes=PROBES)
        seen = []
        for step in range(6):
            if step % 3 == 0:
                counts.clear()
                guard.refresh()
                seen.append(Counter(counts, refresh=1))
            optimizer.zero_grad(set_to_none=True)
            answer_losses(model, NEW).mean().backward()  # type: ignore[no-untyped-call]
            counts.clear()
            optimizer.step()
            seen.append(Counter(counts))
        return [p.detach().to("cpu") for p in model.parameters()], seen


def measured(name: str) -> dict[str, Any]:
    """The share of coordinates that end elsewhere than on the host, and what a refresh and an update count."""
    make = OPTIMIZERS[name]
    pairs = zip(trained(make, "cpu")[0], trained(make, NAME)[0], strict=True)
    apart = torch.cat([(a - b).abs().flatten() for a, b in pairs])
    found: dict[str, Any] = {"apart": float((apart > 1e-5).float().mean())}
    for layers in (1, 4):
        seen = trained(make, NAME, layers)[1]
        found[f"refresh {layers}"] = next(c for c in reversed(seen) if c["refresh"])
        found[f"update {layers}"] = next(c for c in reversed(seen) if not c["refresh"])
    return found


def mixed() -> str:
    """What is said of a sum over two devices."""
    with accelerator():
        try:
            torch.ones(3, device=NAME) + torch.ones(3)
        except RuntimeError as error:
            return str(error)
    return ""


if __name__ == "__main__":
    print(json.dumps({"mixed": mixed(), **{name: measured(name) for name in OPTIMIZERS}}))
