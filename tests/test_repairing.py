"""Repair in memory: importance, ranking, search, and a tiny model that forgot."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cplus import models
from cplus.core.losses import answer_losses
from cplus.core.rows import Encoded
from cplus.methods.after import known_rows
from cplus.methods.repair import (
    ENOUGH,
    TRIALS,
    By,
    Check,
    Unrepairable,
    encode,
    largest_share,
    loss_check,
    mean_gradients,
    mean_loss,
    ranked,
    repair_model,
)
from cplus.methods.table import Material, Past
from cplus.training.driver import start
from cplus.training.settings import TrainSettings

PAST, NEW, HELD = tiny.rows(10, seed=1), tiny.rows(6, seed=4), tiny.rows(4, seed=9)


def trained(model: nn.Module, rows: Sequence[Encoded], steps: int, lr: float) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        answer_losses(model, rows).mean().backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    """A model that knows the past rows, and the same model after learning the new ones alone."""
    base = trained(tiny.lm(), PAST, 60, 1e-2)
    return base, trained(copy.deepcopy(base), NEW, 25, 1e-2)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def changes(model: nn.Module, base: nn.Module, tuned: nn.Module) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each weight now, in the base and in the tuned model."""
    return [(p.detach(), weights(base)[name], weights(tuned)[name]) for name, p in model.named_parameters()]


def same(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("squared", [True, False])
def test_importance_is_the_mean_of_the_rows_gradients(squared: bool) -> None:
    model = tiny.lm().train()
    first, *others = model.parameters()
    first.requires_grad_(False)
    others[0].grad = torch.ones_like(others[0])
    params = [first, *others[1:]]
    found = mean_gradients(model, NEW, params, squared=squared)
    assert (model.training, first.requires_grad, first.grad, others[0].requires_grad) == (True, False, None, True)
    assert bool((others[0].grad == 1).all())
    model.eval().requires_grad_(True)
    expected = [torch.zeros_like(p) for p in params]
    for row in NEW:
        for total, own in zip(expected, torch.autograd.grad(answer_losses(model, [row]).sum(), params), strict=True):
            total += (own**2 if squared else own) / len(NEW)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        first[:] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        mean_gradients(model, NEW, params, squared=squared)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
def test_codes_are_in_the_order_of_the_scores(values: list[float]) -> None:
    scores = torch.tensor(values)
    order = scores.argsort()
    codes = encode(scores, torch.ones_like(scores))[order].tolist()
    assert codes == sorted(codes)
    assert min(codes) > -(2**15)


@pytest.mark.parametrize("by_sum", [False, True])
def test_a_share_of_the_moved_weights_or_of_the_blame_is_found_but_for_ties(by_sum: bool) -> None:
    torch.manual_seed(0)
    scores = torch.randn(4000).exp() * torch.where(torch.rand(4000) < 0.3, -1.0, 1.0)
    counted = torch.arange(4000) >= 400 if not by_sum else scores > 0  # what did not move, or did no harm, never counts
    tensors = slice(0, 3700), slice(3700, 4000)
    codes = [encode(scores[own], counted[own].float()) for own in tensors]
    at, every = ranked(codes, by_sum=by_sum), torch.cat(codes)
    weight = scores.clamp(min=0.0) if by_sum else counted.float()
    assert at(1.0)[1] == int(counted.sum())
    for share in (0.0, 0.01, 0.3, 0.5, 0.99):
        threshold, count = at(share)
        chosen = every >= threshold
        assert count == int(chosen.sum())
        # scores of one code go together
        assert 0.93 * share - 0.01 <= float(weight[chosen].sum() / weight.sum()) <= share * 1.005
        if chosen.any():
            kept = scores[counted & ~chosen]
            least, most = float(scores[chosen].min()), float(kept.max())
            assert least >= most - 0.01 * abs(most)


@given(st.floats(0.02, 1.0), st.floats(0.001, 0.2))
def test_bisection_finds_the_largest_share_within_the_resolution(edge: float, resolution: float) -> None:
    found = largest_share(lambda share: share / edge, resolution)
    assert found <= edge <= found + resolution or (found == 0 and edge <= resolution)


@given(st.floats(0.02, 3.0), st.floats(0.3, 4.0))
def test_a_smooth_quantity_is_found_in_few_trials_and_uses_what_it_may(edge: float, power: float) -> None:
    tried: dict[float, float] = {}

    def used(share: float) -> float:
        return tried.setdefault(share, (share / edge) ** power)

    found = largest_share(used, 0.01, smooth=True)
    assert found == 0 or tried[found] <= 1
    near = found > 0 and tried[found] >= ENOUGH
    assert near or min(1.0, edge) <= found + 0.01
    assert len(tried) <= 2 * TRIALS


@pytest.mark.parametrize("by", ["importance", "blame"])
def test_a_repair_keeps_the_new_rows_and_brings_past_rows_back(pair: tuple[nn.Module, nn.Module], by: By) -> None:
    base, tuned = pair
    model = copy.deepcopy(tuned).train()
    found = repair_model(model, weights(base), PAST, NEW, by=by)
    assert model.training
    [new] = found.new
    assert new.repaired <= new.limit == pytest.approx(new.tuned + 0.05 * (new.base - new.tuned))
    assert found.past.base < found.past.repaired < found.past.tuned
    model.eval()
    assert mean_loss(model, NEW, what="") == pytest.approx(new.repaired)
    assert mean_loss(model, PAST, what="") == pytest.approx(found.past.repaired)
    half = copy.deepcopy(tuned)
    with torch.no_grad():
        for p, before, after in changes(half, base, tuned):
            p.copy_(torch.lerp(before, after, 0.5))
    gradients = torch.autograd.grad(answer_losses(half.eval(), PAST).mean(), list(half.parameters()))
    undone, kept, moved = [], [], 0
    for (p, before, after), gradient in zip(changes(model, base, tuned), gradients, strict=True):
        assert bool(((p == before) | (p == after)).all()), "every weight is the base's or the tuned one"
        harm = gradient * (after - before)
        undone.append(harm[(p == before) & (before != after)])
        kept.append(harm[p != before])
        moved += int((before != after).sum())
    assert (sum(own.numel() for own in undone), moved) == (found.undone, found.moved)
    assert f"{100 * found.share:.1f} % of the moved weights undone" in str(found)
    if by == "importance":
        assert found.share == pytest.approx(found.shares[0], abs=0.01)
        return
    least, most = float(torch.cat(undone).min()), float(torch.cat(kept).max())  # only what raised the past loss
    assert least > 0
    assert least >= most * 0.99  # scores are kept in two bytes


def test_held_out_rows_are_kept_as_well(pair: tuple[nn.Module, nn.Module]) -> None:
    base, tuned = pair
    checks = (loss_check(NEW, tolerance=0.2), loss_check(HELD, name="held-out", held_out=True))
    found = repair_model(copy.deepcopy(tuned), weights(base), PAST, NEW, checks=checks)
    assert [own.name for own in found.new] == ["new", "held-out"]
    for own in found.new:
        assert own.limit is not None
        assert own.repaired <= own.limit


def test_what_cannot_be_repaired_is_refused_and_left_as_it_was(pair: tuple[nn.Module, nn.Module]) -> None:
    base, tuned = pair
    model, before, own = copy.deepcopy(tuned), weights(tuned), weights(base)

    def exactly_tuned(model: nn.Module) -> float:
        return 0.0 if same(model, before) else 50.0

    impossible = Check(name="new", unit="% not known", measure=exactly_tuned, tolerance=0.0)
    name, *others = own
    shorter, missing = own | {name: own[name][:39]}, {each: own[each] for each in others}
    cases: list[Any] = [
        (before, PAST, NEW, (), Unrepairable, "base and tuned model have the same weights"),
        (own, PAST, PAST, (), Unrepairable, "has not learned the new rows, so there is nothing to keep"),
        (own, PAST, NEW, (impossible,), Unrepairable, "no share of the changes can be undone"),
        (own, [], NEW, (), ValueError, "expected past and new rows"),
        (shorter, PAST, NEW, (), ValueError, r"shape of 1 weights: .* is \[39, 16\] in the base and \[40, 16\]"),
        (missing, PAST, NEW, (), ValueError, "only the tuned model has"),
    ]
    for base_weights, past, new, checks, kind, sentence in cases:
        with pytest.raises(kind, match=sentence):
            repair_model(model, base_weights, past, new, checks=checks)
        assert same(model, before)


@pytest.mark.parametrize(
    ("tuned_loss", "after", "helps"),
    [(1.0, 1.2, False), (1.0, 0.2, True), (0.1, 0.4, True), (0.1, 0.6, False)],  # a gate may have lowered it to 0.1
)
def test_a_repair_may_not_raise_the_past_loss_above_both_models(
    pair: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch, tuned_loss: float, after: float, helps: bool
) -> None:
    base, tuned = pair
    model, losses = copy.deepcopy(tuned), iter([tuned_loss, 0.5, after])  # tuned, base, repaired

    def loss(model: nn.Module, rows: Any, *, what: str) -> float:
        return next(losses) if what == "repair: past loss" else mean_loss(model, rows, what=what)

    monkeypatch.setattr("cplus.methods.repair.mean_loss", loss)
    if helps:
        assert repair_model(model, weights(base), PAST, NEW).past.repaired == after
        return
    with pytest.raises(Unrepairable, match="does not lower the loss of the past rows"):
        repair_model(model, weights(base), PAST, NEW)
    assert same(model, weights(tuned))


def test_a_repair_in_bfloat16_casts_the_weights_of_each_pass(make_tiny: Callable[[str], Any]) -> None:
    base = trained(make_tiny("llama").model, PAST, 60, 1e-2)
    choices = {row: (row.target, other.target) for row, other in zip(NEW, HELD + HELD, strict=False)}
    past = Past(name="past", anchors=PAST[:5], probes=PAST[5:])
    material = Material(new=NEW, past=(past,), choices=choices)
    settings = TrainSettings(
        method="sft-repair", epochs=25, lr=1e-2, batch_size=6, order="file", warmup_steps=0, clip_norm=0.0,
        compute_dtype="bfloat16",
    )  # fmt: skip
    training = start(settings, settings.row, copy.deepcopy(base), material)
    for _ in training.run():
        pass
    expected, found = copy.deepcopy(training.model), training.finish()

    def unknown(model: nn.Module) -> float:
        return 100 * (1 - len(known_rows(model, material)[0]) / len(NEW))

    repair_model(
        expected,
        weights(base),
        PAST,
        NEW,
        checks=[Check(name="new", unit="% not known", measure=unknown, tolerance=1.0)],
        computing=lambda: models.computing("bfloat16", torch.device("cpu")),
    )
    assert same(found, weights(expected))
