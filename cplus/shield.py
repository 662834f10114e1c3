"""Source-shielded updates: the columns that matter most to past rows are frozen, chosen once at the base model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cplus.cost import Work
from cplus.data.batching import batched, measured
from cplus.evidence import Reference, Source, named
from cplus.gates import Proposal
from cplus.losses import last_logits, left_padded
from cplus.ranks import layout


@dataclass(frozen=True, kw_only=True)
class ColumnShield:
    """Evidence that is 1 in the frozen columns of every linear layer and 0 elsewhere.

    Source: Yamaguchi et al. 2025, SSU; the score of a weight is Wanda's (Sun et al. 2024, Eq. 1).

        score_j = sum_i |W_ij| * sqrt(mean of x_j^2 over the sources' tokens), the largest `share` of columns frozen

    Embeddings, head, norms and biases are not frozen.
    """

    model: nn.Module
    sources: tuple[Source, ...]
    share: float

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """One forward pass over every source at the current parameters."""
        if layout(params, named(self.model)).sharded:
            raise ValueError("source-shielded updates compare whole columns, but the weights are sharded; use one rank")
        layers = shielded_layers(self.model, params)
        squares, work = self._squares(layers, refresh)
        found = {id(layer.weight): frozen_columns(layer.weight, squares[layer], self.share) for layer in layers}
        return Reference(vectors=[[found.get(id(p), torch.zeros_like(p)) for p in params]], work=work)

    @torch.no_grad()
    def _squares(self, layers: Sequence[nn.Linear], refresh: int) -> tuple[dict[nn.Linear, Tensor], Work]:
        """The weighted mean over tokens of each layer's squared inputs, and the passes."""
        squares = {layer: layer.weight.new_zeros(layer.in_features, dtype=torch.float32) for layer in layers}
        factor, inside = 0.0, torch.ones(1)

        def see(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, nn.Linear)
            x = inputs[0].float().flatten(0, -2) * inside
            squares[layer] += factor * x.square().sum(0)

        hooks, training, work = [layer.register_forward_pre_hook(see) for layer in layers], self.model.training, Work()
        self.model.eval()
        try:
            for source in self.sources:
                rows = source.at(refresh)
                factor = source.weight / sum(map(len, rows))
                for part in batched(rows):
                    texts = [(*row.prompt, *row.target) for row in part]
                    batch = left_padded(texts, next(self.model.parameters()).device)
                    inside = batch["attention_mask"].flatten().unsqueeze(-1)
                    last_logits(self.model, batch, 1)
                    work += Work(rows=len(part), forward=measured(part).padded)
        finally:
            for hook in hooks:
                hook.remove()
            self.model.train(training)
        return squares, work


def shielded_layers(model: nn.Module, params: Sequence[nn.Parameter]) -> list[nn.Linear]:
    """The linear layers that train, without embeddings and head."""
    trained = {id(p) for p in params}
    outer = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer |= {id(head.weight)} if isinstance(head, nn.Linear) else set()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and id(m.weight) in trained - outer]
    if not layers:
        raise ValueError(
            "source-shielded updates freeze columns of linear layers, but no torch.nn.Linear besides the head trains; "
            "choose another method"
        )
    return layers


def frozen_columns(weight: Tensor, squares: Tensor, share: float) -> Tensor:
    """1 in the `share` of columns with the largest score, else 0.

    >>> frozen_columns(torch.tensor([[1.0, -3.0], [1.0, 0.0]]), torch.tensor([4.0, 1.0]), 0.5)
    tensor([[1., 0.],
            [1., 0.]])
    """
    scores = weight.detach().float().abs().sum(0) * squares.sqrt()
    chosen = scores.topk(round(share * len(scores))).indices
    frozen = torch.zeros_like(weight.detach())
    frozen[:, chosen] = 1
    return frozen


def shielded(proposal: Proposal) -> Tensor:
    """0 in the frozen columns, else 1."""
    return (proposal.sign <= 0).to(torch.float32)
