"""New vocabulary entries learn; every other row of the embedding keeps its bits.    python examples/new_tokens.py"""

from __future__ import annotations

import torch
from cplus.data.encoded import Encoded
from cplus.losses import answer_losses
from material import arguments, material

import cplus


def main() -> dict[str, float]:
    """Teach the model two new tokens that stand for the first two wrong answers."""
    options = arguments()
    data = material(options)
    model, known = data.model.train(), data.model.get_input_embeddings().weight.shape[0]
    data.tokenizer.add_tokens(["<one>", "<two>"])
    model.resize_token_embeddings(known + 2)
    rows = [Encoded(row.prompt, (known + i % 2,)) for i, row in enumerate(data.new)]
    before = model.get_input_embeddings().weight.detach().clone()
    model.requires_grad_(False)
    embedding = model.get_input_embeddings().weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([embedding], lr=0.05)  # two rows alone take larger steps
    name = next(name for name, p in model.named_parameters() if p is embedding)
    only = {name: [known, known + 1]}
    guard = cplus.protect(optimizer, model, anchors=data.anchors, probes=data.probes, only_rows=only)  # +
    for _ in range(options.epochs):
        guard.refresh()  # +
        optimizer.zero_grad()
        loss = answer_losses(model, rows).mean()
        loss.backward()
        optimizer.step()
    same = torch.equal(embedding.detach()[:known], before[:known])
    print(f"loss of the new tokens {loss.item():.2f}; the other {known} rows are {'the same' if same else 'changed'}")
    return {"loss": loss.item(), "same": float(same)}


if __name__ == "__main__":
    main()
