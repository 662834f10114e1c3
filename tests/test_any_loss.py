"""Evidence of any loss: exact against Algorithm 1 for four kinds of model, and what is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from any_models import CASES, Scaled, classifier, regressor
from quadratic import copies, proposing, same
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, IterableDataset

from cplus.core import algorithm
from cplus.core.evidence import Entry, LossGradient, MeanGradient, Source, sources
from cplus.core.guard import protect
from cplus.core.losses import answer_losses

EPOCHS = 3


@pytest.mark.parametrize("kind", CASES)
def test_any_model_and_loss_equals_algorithm_1_bitwise(kind: str) -> None:
    case = CASES[kind]()
    twin = copy.deepcopy(case.model)
    params = [p for p in twin.parameters() if p.requires_grad]
    plain = AdamW(params, lr=1e-2)
    first, second = case.past[:2], case.past[2:]

    def mean_gradient(theta: list[Tensor], batches: list[Any]) -> list[Tensor]:
        """The plain mean of each batch's gradient, in evaluation mode."""
        proposing(params, lambda batch: None)(theta, 0)
        twin.eval()
        total = [torch.zeros_like(p) for p in params]
        for batch in batches:
            gradients = torch.autograd.grad(case.loss(twin, batch), params)
            total = [t + g for t, g in zip(total, gradients, strict=True)]
        return [t / len(batches) for t in total]

    def step(batch: Any) -> None:
        twin.train()
        plain.zero_grad()
        case.loss(twin, batch).backward()
        plain.step()

    expected = algorithm.run(
        copies(params),
        epochs=[case.new] * EPOCHS,
        propose=proposing(params, step),
        anchor_gradient=lambda theta: mean_gradient(theta, first),
        probe_gradient=lambda theta: mean_gradient(theta, second),
        anchor_weight=0.5,
        beta=0.9,
    )
    trained = [p for p in case.model.parameters() if p.requires_grad]
    start = copies(trained)
    optimizer = AdamW(trained, lr=1e-2)
    guard = protect(optimizer, case.model, evidence=[(0.5, first, case.loss), (0.5, second, case.loss)], ema="float32")
    case.model.train()
    for _ in range(EPOCHS):
        assert set(guard.refresh().losses) == {"evidence1", "evidence2"}
        for batch in case.new:
            optimizer.zero_grad()
            case.loss(case.model, batch).backward()
            optimizer.step()
    assert same(trained, expected)
    assert same(case.model.buffers(), twin.buffers())
    assert not any(torch.equal(p.detach(), s) for p, s in zip(trained, start, strict=True))


def test_rows_of_tokens_are_one_case() -> None:
    model = tiny.lm()
    params, anchors, probes = list(model.parameters()), tiny.rows(4, seed=1), tiny.rows(6, seed=2)

    def loss(model: nn.Module, rows: Any) -> Tensor:
        return answer_losses(model, rows).mean()

    parts = [(0.25, [anchors[:2], anchors[2:]], loss), (0.75, [probes[:3], probes[3:]], loss)]
    found = LossGradient(model=model, sources=sources(parts))(params, 0)
    rows = (Source(name="a", weight=0.25, rows=anchors), Source(name="p", weight=0.75, rows=probes))
    expected = MeanGradient(model=model, sources=rows)(params, 0)
    for g, h in zip(found.vectors[0], expected.vectors[0], strict=True):
        torch.testing.assert_close(g, h, rtol=1e-5, atol=1e-7)
    assert list(found.losses.values()) == pytest.approx(list(expected.losses.values()))


def test_rows_of_tokens_are_refused_for_models_that_do_not_predict_them() -> None:
    model = CASES["encoder-decoder"]().model
    with pytest.raises(TypeError, match="T5ForConditionalGeneration is an encoder and a decoder; pass evidence="):
        protect(AdamW(model.parameters()), model, anchors=tiny.rows(4, seed=1))


def test_nothing_of_the_users_is_disturbed() -> None:
    case = classifier()
    model = case.model
    model.train()
    model.norm.eval()  # frozen statistics
    kept = copy.deepcopy(model.state_dict())
    case.loss(model, case.new[0]).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    loader = DataLoader(torch.arange(4), shuffle=True, collate_fn=lambda picked: case.past[int(picked[0])])

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return case.loss(model, batch) + 0 * torch.rand(()) + 0 * model.head.weight.sum()

    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    guard = protect(SGD(model.parameters(), lr=0.1), model, evidence=[(1.0, loader, noisy)])
    guard.refresh()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert same(model.state_dict().values(), kept.values())
    assert same([p.grad for p in model.parameters()], gradients)
    assert (model.training, model.norm.training) == (True, False)


def test_sources_that_reach_different_parameters_are_added_up() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    x = torch.randn(3, 2)
    entries: list[Entry] = [(0.5, [x], lambda m, x: m["a"](x).mean()), (0.5, [x], lambda m, x: m["b"](x).mean())]
    guard = protect(SGD(model.parameters(), lr=0.1), model, evidence=entries)
    assert guard.refresh().norm == pytest.approx(0.5 * (2 * (float(x.mean(0).square().sum()) + 1)) ** 0.5)


class Once(IterableDataset):  # type: ignore[type-arg]
    """A dataset that remembers how far it was read."""

    def __init__(self, batches: list[Any]) -> None:
        self.left = iter(batches)

    def __iter__(self) -> Iterator[Any]:
        return self.left


def unwell(change: Callable[[Scaled], None]) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: (change(model), classifier_loss(model, batch))[1]


CASE = classifier()
classifier_loss = CASE.loss
BAD: dict[str, tuple[Entry, str]] = {
    "vector": ((1.0, CASE.past, lambda m, b: m(b[0])[:, 0]), r"batch 1, must be a scalar, got the shape \(5,\)"),
    "number": ((1.0, CASE.past, lambda m, b: 3.0), "must be a scalar tensor, got float"),
    "nan": ((1.0, CASE.past, lambda m, b: classifier_loss(m, b) * float("nan")), "evidence1 is nan: evidence must be"),
    "constant": ((1.0, CASE.past, lambda m, b: torch.zeros(())), "depends on no trained parameter"),
    "detached": ((1.0, CASE.past, lambda m, b: classifier_loss(m, b).detach()), "depends on no trained parameter"),
    "unreached": ((1.0, CASE.past, lambda m, b: m.head.weight.sum()), r"5 of 6 .* get no evidence \(first: convolut"),
    "training mode": ((1.0, CASE.past, unwell(lambda m: m.train() and None)), "the buffer 'norm.running_mean', the"),
    "new buffer": (
        (1.0, CASE.past, unwell(lambda m: setattr(m.norm, "running_var", torch.ones(4) * 2))),
        "'norm.running_var'; buffers are",
    ),
    "generator": ((1.0, (b for b in CASE.past), classifier_loss), "a generator, which can be read only once"),
    "cycle": ((1.0, itertools.cycle(CASE.past), classifier_loss), "a cycle, which can be read only once"),
    "one pass": (
        (1.0, DataLoader(Once(CASE.past), batch_size=None), classifier_loss),
        "no batch when read a second time",
    ),
    "empty": ((1.0, [], classifier_loss), "evidence1 has no batch; give at least one"),
    "no batches": ((1.0, 7, classifier_loss), "needs an iterable of batches, got int"),  # type: ignore[dict-item]
    "no function": ((1.0, CASE.past, 7), r"needs a function loss\(model, batch\), got int"),  # type: ignore[dict-item]
    "weight": ((-1.0, CASE.past, classifier_loss), "weight of evidence1 must be a positive number, got -1.0"),
    "pair": ((1.0, CASE.past), r"must be \(weight, batches, loss function\), got"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", BAD)
def test_bad_evidence_is_named_before_the_first_step_and_nothing_is_attached(name: str) -> None:
    model = classifier().model
    kept = copy.deepcopy(model.state_dict())
    optimizer = AdamW(model.parameters())
    entry, sentence = BAD[name]
    with pytest.raises((ValueError, TypeError, FloatingPointError), match=sentence):
        protect(optimizer, model, evidence=[entry])
    assert not optimizer._optimizer_step_pre_hooks
    assert same(model.state_dict().values(), kept.values())
    assert model.training


def test_a_loss_that_writes_a_parameter_is_named() -> None:
    model = classifier().model

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            model.head.bias.add_(1.0)
        return classifier_loss(model, batch)

    with pytest.raises(ValueError, match=r"state: the parameter 'head.bias'; buffers are restored. A loss must"):
        protect(AdamW(model.parameters()), model, evidence=[(1.0, CASE.past, loss)])


def test_a_source_that_runs_dry_later_is_named_at_that_refresh() -> None:
    case = regressor()
    batches = list(case.past)
    guard = protect(SGD(case.model.parameters(), lr=0.1), case.model, evidence=[(1.0, batches, case.loss)])
    guard.refresh()
    batches.clear()
    with pytest.raises(ValueError, match="evidence1 has no batch"):
        guard.refresh()
