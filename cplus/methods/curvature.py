"""Gates measured once at the base model: by curvature, and by columns that past rows depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cplus.base.cost import Work
from cplus.core.engine import Engine, engine_of, local
from cplus.core.evidence import Reference, Source, borrowed_gradients, checked_norm, evaluating, refuse_unreached
from cplus.core.losses import answer_losses, last_logits, left_padded
from cplus.core.rows import batched, measured

# The curvature gate: a coordinate moves the less, the more past rows depend on it at the base model.


VALUES = 1 << 15
"""The number of bfloat16 values that are not negative; their bits count upwards with the value."""


def attenuation(squares: Tensor, damping: float) -> Tensor:
    """The share of each coordinate of the proposal that is applied; 1 where past rows do not depend on it.

    c = d / (d + F)

    >>> attenuation(torch.tensor([0.0, 1.0, 3.0]), 1.0)
    tensor([1.0000, 0.5000, 0.2500])
    """
    return damping / (damping + squares)


def damping(squares: Sequence[Tensor], share: float, engine: Engine | None = None) -> float:
    """The d with which the mean of d / (d + F) over all coordinates with F > 0 is `share`; 1 if there are none.

    F is rounded to bfloat16 here and counted by value, so that shards add up to the same counts bit for bit.

    >>> round(damping([torch.tensor([0.0, 1.0, 1.0])], 0.5), 6)
    1.0
    """
    counts = torch.zeros(VALUES, dtype=torch.float64, device=squares[0].device)
    for own in squares:
        bits = own.detach().bfloat16().view(torch.int16).flatten().int()
        counts += torch.bincount(bits, minlength=VALUES)[:VALUES]
    counts = (engine.sum(counts) if engine is not None and engine.sharded else counts).cpu()
    values = torch.arange(VALUES, dtype=torch.int16).view(torch.bfloat16).double()
    used = (counts > 0) & (values > 0) & values.isfinite()
    counts, values = counts[used], values[used]
    if not len(values):
        return 1.0
    low, high = math.log(float(values[0])) - 40.0, math.log(float(values[-1])) + 40.0
    for _ in range(60):
        middle = (low + high) / 2
        found = float((counts * attenuation(values, math.exp(middle))).sum() / counts.sum())
        low, high = (middle, high) if found < share else (low, middle)
    return math.exp((low + high) / 2)


@dataclass(frozen=True, kw_only=True)
class Curvature:
    """Evidence that is the coefficients themselves, in bfloat16: two bytes per parameter.

        F = sum_s w_s * mean_{i in s} (d loss_i / d theta)^2,    c = d / (d + F),    mean of c over F > 0: `strength`

    F is the diagonal of the empirical Fisher information of anchors and probes, the second order of what a change of a
    coordinate costs past rows. One damping d for all tensors: whole layers that matter more move less.
    """

    model: nn.Module
    sources: tuple[Source, ...]
    strength: float

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """One backward pass per row at the current parameters."""
        engine = engine_of(self.model, params)
        for source in self.sources:
            engine.check_alike(source.at(refresh), source.name, params[0].device)
        squares, totals, work = squared_gradients(self.model, self.sources, params, refresh)
        means = {s.name: total / len(s.at(refresh)) for s, total in zip(self.sources, totals, strict=True)}
        checked_norm(engine, params, squares, means)
        d = damping(squares, self.strength, engine)
        total = torch.stack([own.double().sum() for own in squares]).sum()
        total = engine.sum(total) if engine.sharded else total
        coefficients = [attenuation(own, d).bfloat16() for own in squares]
        return Reference(vectors=[coefficients], losses=means, work=work, norm=math.sqrt(total))


def squared_gradients(
    model: nn.Module, sources: Sequence[Source], params: Sequence[nn.Parameter], refresh: int
) -> tuple[list[Tensor], list[float], Work]:
    """The weighted means of the squared gradients, row by row, each source's summed loss, and the passes.

    Shards see every row; whole copies share the rows.
    """
    engine = engine_of(model, params)
    seen = [
        (i, source.weight / len(source.at(refresh)), row)
        for i, source in enumerate(sources)
        for row in source.at(refresh)
    ]
    own = seen if engine.sharded else engine.rows(seen)
    squares = [torch.zeros_like(local(p), dtype=torch.float32) for p in params]
    totals = [0.0] * len(sources)
    with borrowed_gradients(model, params) as passes:
        for i, weight, row in own:
            loss = answer_losses(model, [row]).sum()
            passes.backward(loss)
            totals[i] += float(loss.detach())
            for square, gradient in zip(squares, passes.take(), strict=True):
                if gradient is not None:
                    square.addcmul_(gradient.float(), gradient.float(), value=weight)
        if own:
            refuse_unreached(engine, passes, passes.unreached())
    if not engine.sharded:
        squares, totals = engine.total(squares), engine.sums(totals, squares[0].device)
    return squares, totals, sum((measured([row]) for _, _, row in seen), Work())


# Source-shielded updates: the columns that matter most to past rows are frozen, chosen once at the base model.


@dataclass(frozen=True, kw_only=True)
class ColumnShield:
    """Evidence that is 1 in the frozen columns of every linear layer and 0 elsewhere.

    Source: Yamaguchi et al. 2025, SSU; the score of a weight is Wanda's (Sun et al. 2024, Eq. 1).

        score_j = sum_i |W_ij| * sqrt(mean of x_j^2 over the sources' tokens), the largest `strength` of columns frozen

    Embeddings, head, norms and biases are not frozen.
    """

    model: nn.Module
    sources: tuple[Source, ...]
    strength: float

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """One forward pass over every source at the current parameters."""
        if engine_of(self.model, params).sharded:
            raise ValueError("source-shielded updates compare whole columns, but the weights are sharded; use one rank")
        layers = shielded_layers(self.model, params)
        # The weighted mean over tokens of each layer's squared inputs.
        squares = {layer: layer.weight.new_zeros(layer.in_features, dtype=torch.float32) for layer in layers}
        factor, inside = 0.0, torch.ones(1)

        def see(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, nn.Linear)
            x = inputs[0].float().flatten(0, -2) * inside
            squares[layer] += factor * x.square().sum(0)

        work = Work()
        with ExitStack() as hooks, evaluating(self.model), torch.no_grad():
            for layer in layers:
                hooks.callback(layer.register_forward_pre_hook(see).remove)
            for source in self.sources:
                rows = source.at(refresh)
                factor = source.weight / sum(map(len, rows))
                for part in batched(rows):
                    texts = [(*row.prompt, *row.target) for row in part]
                    batch = left_padded(texts, next(self.model.parameters()).device)
                    inside = batch["attention_mask"].flatten().unsqueeze(-1)
                    last_logits(self.model, batch, 1)
                    work += Work(rows=len(part), forward=measured(part).padded)
        found = {id(layer.weight): frozen_columns(layer.weight, squares[layer], self.strength) for layer in layers}
        return Reference(vectors=[[found.get(id(p), torch.zeros_like(p)) for p in params]], work=work)


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
