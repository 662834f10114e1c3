"""A plain torch loop; three lines make it CPLUS.    python examples/plain_loop.py"""

from __future__ import annotations

import random

import torch
from cplus.losses import answer_losses
from material import arguments, material

import cplus


def main() -> dict[str, float]:
    """Learn new rows and keep the known ones."""
    options = arguments()
    data = material(options)
    data.report("before", data.model)
    model, rows = data.model.train(), list(data.new)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    guard = cplus.protect(optimizer, model, anchors=data.anchors, probes=data.probes)  # +
    for epoch in range(options.epochs):
        guard.refresh()  # +
        random.Random(epoch).shuffle(rows)
        for first in range(0, len(rows), options.batch):
            optimizer.zero_grad()
            answer_losses(model, rows[first : first + options.batch]).mean().backward()
            optimizer.step()
    guard.detach()  # +
    return data.report("after", model)


if __name__ == "__main__":
    main()
