"""A method of your own: one row of the table and one pure function.    python examples/own_method.py

By its name everywhere else:    cplus adapt MODEL --new new.jsonl --anchors keep.jsonl --method python:own_method:SOFT
"""

from __future__ import annotations

import torch
from cplus.gates import Elementwise, Proposal
from cplus.loop import EpochEnded, Schedule, adapt, prepare

from cplus.methods import BLEND, Material, Method, Past


def soft(step: Proposal) -> torch.Tensor:
    """Attenuate a coordinate by how much it would raise the past loss, measured by its tensor's mean.

    harm = max(0, g_hat * delta), coefficient = 1 - tanh(harm / mean harm)
    """
    harm = (step.sign * step.delta).clamp(min=0)
    return 1 - torch.tanh(harm / harm.mean().clamp(min=torch.finfo(harm.dtype).tiny))


SOFT = Method(
    name="soft",
    summary="Scales a coordinate down by the harm it does, with no memory of earlier steps.",
    paper="examples/own_method.py",
    evidence=BLEND,
    gate=lambda row, seed: Elementwise(soft),
)


def main() -> dict[str, float]:
    """Learn new rows by the new method and keep the known ones."""
    from material import arguments, material

    options = arguments()
    data = material(options)
    data.report("before", data.model)
    optimizer = torch.optim.AdamW(data.model.parameters(), lr=options.lr, weight_decay=0.0)
    rows = Material(new=data.new, past=(Past(name="past", anchors=data.anchors, probes=data.probes),))
    prepared = prepare(SOFT, optimizer, data.model, rows, seed=0)
    schedule = Schedule(epochs=options.epochs, batch_size=options.batch, order="shuffled")
    for event in adapt(data.model, optimizer, prepared, schedule=schedule, seed=0):
        if isinstance(event, EpochEnded):
            print(f"epoch {event.epoch}, {event.step} updates", flush=True)
    assert prepared.guard is not None
    prepared.guard.detach()
    return data.report("after", data.model)


if __name__ == "__main__":
    main()
