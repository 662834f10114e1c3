"""Passes dealt to processes, their gradients added in one order, and what depends on neither."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
import two_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cplus.core import passes
from cplus.core.evidence import MeanGradient
from cplus.core.losses import answer_losses
from cplus.core.passes import OrderedReduction, Turn, arrange, drawing, turns
from cplus.core.rows import like_length
from cplus.core.shards import Layout
from cplus.methods.objectives import mean_backward, spread_backward

pytestmark = pytest.mark.usefixtures("one_thread")


@given(count=st.integers(1, 30), world=st.integers(1, 9))
def test_every_pass_has_one_process_and_all_take_part_in_each_turn(count: int, world: int) -> None:
    batches = [[number] for number in range(count)]
    dealt = [list(turns(batches, Layout(rank=rank, world=world))) for rank in range(world)]
    assert {len(own) for own in dealt} == {math.ceil(count / world)}
    in_order = [turn for together in zip(*dealt, strict=True) for turn in together if turn.weight]
    assert [turn.items for turn in in_order] == batches
    for together in zip(*dealt, strict=True):
        assert {turn.live for turn in together} == {sum(turn.weight > 0 for turn in together)}
    for own in dealt:
        assert [turn.first for turn in own] == [True] + [False] * (len(own) - 1)
        assert [turn.last for turn in own] == [False] * (len(own) - 1) + [True]


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 100])
def test_rows_fall_into_at_least_as_many_parts_where_they_suffice(parts: int) -> None:
    rows = tiny.rows(17, seed=2)
    found = list(like_length(rows, 4096, parts))
    assert sorted(item for batch in found for item in batch) == list(range(17))
    assert len(found) >= min(parts, 17 // math.ceil(17 / parts))
    assert max(map(len, found)) <= math.ceil(17 / parts)


def test_parts_change_a_gradient_by_rounding_alone() -> None:
    rows = tiny.rows(8, seed=4)
    whole, split = tiny.lm(), tiny.lm()
    arrange(split, 4, 1)
    expected, work = mean_backward(whole, rows, answer_losses)
    loss, same = spread_backward(split, rows, answer_losses)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert (same.rows, same.tokens) == (work.rows, work.tokens)
    for p, q in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-7)
    evidence = [MeanGradient(model=model, sources=two_ranks.SOURCES) for model in (whole, split)]
    first, second = (each(list(each.model.parameters()), 0) for each in evidence)
    assert second.losses == pytest.approx(first.losses, rel=1e-6)
    for g, h in zip(first.vectors[0], second.vectors[0], strict=True):
        torch.testing.assert_close(g, h, rtol=1e-4, atol=1e-7)


def test_a_clipped_gradient_is_torchs() -> None:
    one, two = (nn.Parameter(torch.zeros(300, 300)) for _ in range(2))
    for limit in (1.0, 1e6):
        one.grad = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
        two.grad = one.grad.clone()
        passes.clip([one], limit, Layout())
        torch.nn.utils.clip_grad_norm_([two], limit)
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-6, atol=0)


def test_a_pass_draws_the_same_numbers_whichever_process_has_it() -> None:
    def drawn(numbers: list[int]) -> tuple[dict[int, float], float]:
        torch.manual_seed(3)
        with drawing(torch.device("cpu")) as draw:
            found = {number: (draw(number), float(torch.rand(())))[1] for number in numbers}
        return found, float(torch.rand(()))

    (one, after), (other, later) = drawn([0, 1, 2, 3]), drawn([3, 1])
    assert len(set(one.values())) == 4
    assert {number: one[number] for number in other} == other
    assert after == later


def test_passes_that_reach_different_weights_are_refused() -> None:
    class Two:
        def size(self) -> int:
            return 2

    reduction = OrderedReduction()
    reduction._total = torch.zeros(3)
    reduction.begin(Turn(first=False))
    with pytest.raises(RuntimeError, match="reach different weights"):
        reduction(torch.zeros(2), torch.zeros(4), Two(), None)  # type: ignore[arg-type]


def test_shards_that_cannot_add_in_order_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.weight.device_mesh = None  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="cannot add the gradients of shards in order"):
        arrange(model, 2, 2)
