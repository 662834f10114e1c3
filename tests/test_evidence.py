"""Evidence equals the paper's per-example definition whatever the batching, and leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from cplus.base.cost import TRAINING_RESERVE
from cplus.core.evidence import MeanGradient, Source
from cplus.core.losses import answer_losses, divergences, last_logits, left_padded, shared_losses
from cplus.core.rows import Encoded
from cplus.methods.variants import LogitBasis, NormAligned, Tail, dot, example_losses, ogd, storage


def one_at_a_time(model: nn.Module, row: Encoded) -> Tensor:
    """The definition: full logits, no padding, mean over the target's tokens."""
    ids = torch.tensor([row.prompt + row.target])
    logits = model(input_ids=ids).logits[0].float()
    start = len(row.prompt)
    return F.cross_entropy(logits[start - 1 : -1], ids[0, start:])


def definition(model: nn.Module, sources: Sequence[Source]) -> list[Tensor]:
    """The weighted sum of per-example gradients, one backward pass each."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for source in sources:
        for row in source.rows:
            model.zero_grad()
            (one_at_a_time(model, row) * source.weight / len(source.rows)).backward()
            for t, p in zip(total, model.parameters(), strict=True):
                t += p.grad
    model.zero_grad()
    return total


SOURCES = (
    Source(name="anchors", weight=0.5, rows=tiny.rows(5, seed=1)),
    Source(name="probes", weight=0.5, rows=tiny.rows(17, seed=2)),
)


@pytest.mark.parametrize("max_tokens", [1, 24, 64, 4096])
def test_mean_gradient_is_the_definition_whatever_the_batching(max_tokens: int) -> None:
    model = tiny.lm()
    expected = definition(model, SOURCES)
    params = list(model.parameters())
    found = MeanGradient(model=model, sources=SOURCES, max_tokens=max_tokens)(params, 0)
    for g, e in zip(found.vectors[0], expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-7)
    assert found.work.rows == 22
    assert found.work.tokens == sum(len(row) for source in SOURCES for row in source.rows)
    assert found.losses["anchors"] == pytest.approx(
        sum(float(one_at_a_time(model, row)) for row in SOURCES[0].rows) / 5, rel=1e-5
    )


def test_a_model_without_logits_to_keep_gives_the_same_losses() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=tiny.VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2))
    rows = tiny.rows(6)

    class Bare(nn.Sequential):
        """Hides the keyword."""

        def forward(self, **batch: Any) -> object:
            return self[0](**batch)

    model.eval()
    batch = left_padded([row.prompt for row in rows], torch.device("cpu"))
    torch.testing.assert_close(last_logits(Bare(model), batch, 2), last_logits(model, batch, 2))
    expected = torch.stack([one_at_a_time(model, row) for row in rows])
    torch.testing.assert_close(answer_losses(model, rows), expected, rtol=1e-4, atol=1e-5)


def test_refreshing_leaves_gradients_mode_and_weights_alone() -> None:
    model = tiny.lm().train()
    answer_losses(model, tiny.rows(3)).sum().backward()
    before = copy.deepcopy([(p.detach(), p.grad) for p in model.parameters()])
    MeanGradient(model=model, sources=SOURCES)(list(model.parameters()), 0)
    assert model.training
    for p, (value, grad) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)
        assert p.grad is not None
        assert torch.equal(p.grad, grad)


def test_evidence_that_is_missing_or_not_finite_is_refused() -> None:
    for given, sentence in (
        ({"weight": 0.5, "rows": []}, "source 'anchors' is empty"),
        ({"weight": 1.5, "rows": tiny.rows(1)}, r"must lie in \[0, 1\], got 1.5"),
        ({"weight": 0.5, "rows": tiny.rows(2), "parts": 3}, "too few for 3 parts"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Source(name="anchors", **given)
    model = tiny.lm()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"2 of \d+ protected parameters get no evidence \(first: extra.weight"):
        MeanGradient(model=model, sources=SOURCES)(list(model.parameters()), 0)
    assert all(p.grad is None for p in model.parameters())
    model = tiny.lm()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="the loss of the anchors is nan"):
        MeanGradient(model=model, sources=SOURCES)(list(model.parameters()), 0)


def test_rotating_parts_cover_the_bank_in_turn() -> None:
    source = Source(name="probes", weight=1.0, rows=tiny.rows(10), parts=4)
    assert sorted(id(row) for refresh in range(4) for row in source.at(refresh)) == sorted(map(id, source.rows))
    assert source.at(4) == source.at(0)


def test_norm_alignment_scales_each_source_to_the_first() -> None:
    model = tiny.lm()
    params = list(model.parameters())
    alone = [
        MeanGradient(model=model, sources=(Source(name=s.name, weight=1.0, rows=s.rows),))(params, 0).vectors[0]
        for s in SOURCES
    ]
    ratio = (dot(alone[0], alone[0]) / dot(alone[1], alone[1])) ** 0.5
    found = NormAligned(model=model, sources=SOURCES)(params, 0).vectors[0]
    for g, a, b in zip(found, *alone, strict=True):
        torch.testing.assert_close(g, 0.5 * a + 0.5 * ratio * b, rtol=1e-4, atol=1e-7)


def test_the_tail_is_the_mean_over_the_worst_examples() -> None:
    model = tiny.lm()
    params = list(model.parameters())
    losses = example_losses(model, SOURCES[1].rows)
    worst = sorted(range(17), key=lambda i: -losses[i])[:4]
    expected = definition(model, [Source(name="probes", weight=1.0, rows=[SOURCES[1].rows[i] for i in worst])])
    probes = Source(name="probes", weight=1.0, rows=SOURCES[1].rows)
    found = Tail(model=model, sources=(probes,), share=0.25)(params, 0)
    for g, e in zip(found.vectors[0], expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-7)
    assert found.work.rows == 4
    assert found.work.forward >= sum(map(len, SOURCES[1].rows))


def test_the_logit_basis_is_orthonormal_and_bounded_in_memory() -> None:
    model = tiny.lm()
    params = list(model.parameters())
    rows = [*tiny.rows(4, seed=3), tiny.rows(4, seed=3)[0]]  # the last repeats the first
    basis = LogitBasis(model=model, rows=rows)(params, 0).vectors
    assert len(basis) == 4
    for i, a in enumerate(basis):
        for j, b in enumerate(basis):
            assert dot(a, b) == pytest.approx(float(i == j), abs=1e-5)
    half = LogitBasis(model=model, rows=rows, place=lambda count, params: storage(count, params, free=room(3.0)))
    stored = half(params, 0).vectors
    assert {v.dtype for vector in stored for v in vector} == {torch.bfloat16}
    for a, b in zip(basis, stored, strict=True):
        assert dot(a, b) == pytest.approx(1.0, abs=1e-2)
    gradient = [torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) for p in params]
    whole, rounded = ([g.clone() for g in gradient] for _ in range(2))
    ogd(whole, basis)
    ogd(rounded, stored)
    gone, off = ([x - y for x, y in zip(a, b, strict=True)] for a, b in ((gradient, whole), (whole, rounded)))
    assert dot(off, off) < 1e-3 * dot(gone, gone)  # half precision changes little of what is removed
    with pytest.raises(ValueError, match=r"keeps 5 gradients: in half precision they need .*; use fewer anchors"):
        LogitBasis(model=model, rows=rows, place=lambda count, params: storage(count, params, free=room(1.0)))(
            params, 0
        )


def room(vectors_of_4_bytes: float) -> Callable[[torch.device], int]:
    """A device with room for so many vectors beside the training of the small model."""
    numbers = sum(p.numel() for p in tiny.lm().parameters())
    return lambda device: round(numbers * (TRAINING_RESERVE + 4 * vectors_of_4_bytes))


def test_vectors_go_to_the_host_where_the_device_has_no_room() -> None:
    params = [torch.empty(1000, device="meta")]  # a device besides the host

    def free(device: torch.device) -> int:
        return {"meta": 1000 * TRAINING_RESERVE + 9_000, "cpu": 10**9}[device.type]

    found = [storage(count, params, free=free) for count in (2, 4, 8)]
    places = [("meta", torch.float32), ("meta", torch.bfloat16), ("cpu", torch.bfloat16)]
    assert [(device.type, dtype) for device, dtype in found] == places


def test_divergence_from_itself_is_zero_and_from_another_is_the_formula() -> None:
    model, frozen = tiny.lm(0), tiny.lm(1)
    rows = tiny.rows(5)
    torch.testing.assert_close(divergences(model, model, rows), torch.zeros(5), atol=1e-6, rtol=0)
    for row, found in zip(rows, divergences(model, frozen, rows), strict=True):
        ids = torch.tensor([row.prompt + row.target])
        p, q = (m(input_ids=ids).logits[0, len(row.prompt) - 1 : -1].softmax(-1) for m in (frozen, model))
        expected = (p * (p.log() - q.log())).sum(-1).mean()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_a_common_beginning_read_once_gives_the_same_gradient(make_tiny: Callable[[str], Any], family: str) -> None:
    model = make_tiny(family).model.eval()
    vocabulary = model.config.vocab_size
    begin = tuple(token % vocabulary for token in range(3, 14))
    rows = [Encoded((*begin, 5, *range(7, 7 + i)), tuple(range(4, 5 + i % 3))) for i in range(6)]
    sources = (Source(name="anchors", weight=0.5, rows=rows[:2]), Source(name="probes", weight=0.5, rows=rows[2:]))
    params = [p for p in model.parameters() if p.requires_grad]
    calls: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, __, given: calls.append(given["input_ids"].numel()), with_kwargs=True
    )
    found = MeanGradient(model=model, sources=sources)(params, 0)
    read = sum(calls)
    handle.remove()
    assert read <= sum(map(len, rows)) - 3 * len(begin)  # the beginning was not read with every row
    expected = definition(model, sources)
    for g, e in zip(found.vectors[0], expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-6)


def test_dropout_is_never_shared() -> None:
    model = tiny.lm().train()
    rows = [Encoded((*range(1, 12), i), (3,)) for i in range(3)]
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given.get("past_key_values")), with_kwargs=True)
    shared_losses(model, rows)
    assert seen == [None]
