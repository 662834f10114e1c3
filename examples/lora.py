"""LoRA adapters under the gate, merged at the end.    python examples/lora.py"""

from __future__ import annotations

import random

import torch
from material import arguments, material
from peft import LoraConfig, get_peft_model

import cplus
from cplus.core.losses import answer_losses
from cplus.integrations.transformers import scope


def main() -> dict[str, float]:
    """Learn new rows in adapters and keep the known ones."""
    options = arguments()
    data = material(options)
    data.report("before", data.model)
    model = get_peft_model(data.model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    rows = list(data.new)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=2 * options.lr, weight_decay=0.0
    )
    guard = cplus.protect(optimizer, model, anchors=data.anchors, probes=data.probes)
    print(scope(model, guard))
    for epoch in range(options.epochs):
        guard.refresh()
        random.Random(epoch).shuffle(rows)
        for first in range(0, len(rows), options.batch):
            optimizer.zero_grad()
            answer_losses(model, rows[first : first + options.batch]).mean().backward()
            optimizer.step()
    guard.detach()
    return data.report("after, merged", model.merge_and_unload())


if __name__ == "__main__":
    main()
