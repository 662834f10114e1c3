"""Rows of other people's methods against computations by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tiny
import torch
from quadratic import same
from torch import Tensor, nn

from cplus.core import rows as batching
from cplus.core.rows import Encoded
from cplus.methods import adapters
from cplus.methods.after import averaged, base_weights, known_rows
from cplus.methods.curvature import ColumnShield
from cplus.methods.table import ANSWER_TOKENS, METHODS, Material, Past, configured
from cplus.training.loop import Prepared, Schedule, adapt, prepare

NEW = tiny.rows(7, seed=11, longest_target=4)


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def moved(model: nn.Module, by: float, seed: int = 1) -> nn.Module:
    """A copy with noise added to every parameter."""
    draw = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn(p.shape, generator=draw) * by)
    return other


def test_averaged_weights_are_on_the_line_and_exact_at_its_ends() -> None:
    model, material = tiny.lm(), tiny.material()
    base, tuned = base_weights(model), moved(model, 0.1)
    for share in (0.0, 0.25, 1.0):
        found = copy.deepcopy(tuned)
        work, _ = averaged(found, base, material, strength=share)
        assert work.forward == 0
        ends = copied(tuned)
        for name, p in found.named_parameters():
            torch.testing.assert_close(p, (1 - share) * base[name] + share * ends[name])
            assert share not in (0.0, 1.0) or torch.equal(p, (base, ends)[int(share)][name])


def test_the_smallest_share_that_keeps_every_known_row_is_chosen() -> None:
    model, rows = tiny.lm(), tiny.rows(12, seed=3)
    tuned = moved(model, 0.3)
    # Rows that the tuned model repeats and the base model does not: its own likeliest token as the target.
    new = [Encoded(row.prompt, (likeliest(tuned, row),)) for row in rows]
    new = [row for row in new if likeliest(model, row) != row.target[0]]
    known, _ = known_rows(tuned, Material(new=new))
    assert known == set(new)
    base, found = base_weights(model), copy.deepcopy(tuned)
    work, _ = averaged(found, base, Material(new=new))
    for first in range(1, 11):
        averaged(expected := copy.deepcopy(tuned), base, Material(new=new), strength=first / 10)
        if all(likeliest(expected, row) == row.target[0] for row in new):
            break
    assert 1 < first < 10
    assert same(found.parameters(), expected.parameters())
    assert work.padded == 0
    assert work.forward >= (first + 1) * sum(map(len, new))  # the tuned model and every share tried
    unknown = [Encoded(row.prompt, ((row.target[0] + 1) % tiny.VOCABULARY,)) for row in new]
    averaged(found := copy.deepcopy(tuned), base, Material(new=unknown))  # what is not known needs no protection
    assert same(found.parameters(), tuned.parameters())


def test_a_row_with_choices_is_known_by_its_best_choice() -> None:
    model, [row, other] = tiny.lm(), tiny.rows(2, seed=3)
    logits = model(torch.tensor([row.prompt])).logits[0, -1]
    order = logits.argsort(descending=True).tolist()
    second = Encoded(row.prompt, (order[1],))
    assert known_rows(model, Material(new=[second]))[0] == set()  # no choices: only the likeliest token counts
    worse, better = {second: ((order[1],), (order[5],))}, {second: ((order[0],), (order[1],))}
    known, work = known_rows(model, Material(new=[second], choices=worse))
    assert known == {second}
    assert work.forward == len(row.prompt) + 2
    assert known_rows(model, Material(new=[second], choices=better))[0] == set()
    alone = Material(new=[second, other], choices={second: ((order[1],),)})
    assert second not in known_rows(model, alone)[0]  # one choice is no choice


def test_low_rank_adapters_are_averaged_as_merged_weights() -> None:
    plain = tiny.lm()
    model = adapters.lora(copy.deepcopy(plain), 0)
    row = configured(METHODS["wise-ft"], strength=0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    prepared = prepare(row, optimizer, model, tiny.material(), seed=0)
    list(adapt(model, optimizer, prepared, schedule=Schedule(epochs=2), seed=0))
    found = adapters.merged(model)
    tuned, before = copied(found), copied(plain)
    prepared.finish(found)
    for name, p in found.named_parameters():
        torch.testing.assert_close(p, 0.75 * before[name] + 0.25 * tuned[name])
    apart = [name for name, p in before.items() if not torch.equal(p, tuned[name])]
    assert len(apart) == 14  # seven linear layers in each of two blocks


def likeliest(model: nn.Module, row: Encoded) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([row.prompt])).logits[0, -1].argmax())


def chances(model: nn.Module, row: Encoded) -> Tensor:
    """The log-probabilities at the row's target positions, row by row and without padding."""
    ids = torch.tensor([[*row.prompt, *row.target[:-1]]])
    return model(ids).logits[0, len(row.prompt) - 1 :].float().log_softmax(-1)


def token_losses(model: nn.Module, row: Encoded) -> Tensor:
    return -chances(model, row)[torch.arange(len(row.target)), torch.tensor(row.target)]


def bound(name: str, model: nn.Module, material: Material, strength: float | None = None) -> Prepared:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return prepare(configured(METHODS[name], strength=strength), optimizer, model, material, seed=0)


def check(prepared: Prepared, model: nn.Module, rows: Sequence[Encoded], expected: Tensor) -> Any:
    """Loss and gradient of a batch are those of the expected scalar; returns the batch's work."""
    model.zero_grad()
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss, work = prepared.backward(rows)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for p, g in zip([p for p in model.parameters() if p.grad is not None], gradients, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-6)
    return work


def mean_over_rows(rows: Sequence[Encoded], each: Callable[[Encoded], Tensor]) -> Tensor:
    return torch.stack([each(row).mean() for row in rows]).mean()


@pytest.mark.parametrize("strength", [None, 0.5])
def test_tokens_are_weighted_by_the_entropy_of_the_likeliest(strength: float | None) -> None:
    model = moved(tiny.lm(), 0.1)

    def each(row: Encoded) -> Tensor:
        top = chances(model, row).detach().exp().sort(descending=True).values[:, :20]
        top = top / top.sum(1, keepdim=True)
        entropy = -(top * top.log()).sum(1) / math.log(20)
        return entropy ** (strength or 1.0) * token_losses(model, row)

    prepared = bound("eaft", model, Material(new=NEW), strength)
    check(prepared, model, NEW, mean_over_rows(NEW, each))


@pytest.mark.parametrize("tokens", [2048, 16])
def test_easy_tokens_count_more_whatever_the_passes(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, strength = moved(tiny.lm(), 0.3), 0.25
    losses = {row: token_losses(model, row) for row in NEW}
    tau = strength * float(torch.stack([own.detach().mean() for own in losses.values()]).mean())
    weights = {row: (-own.detach() / tau).exp().clamp(min=0.01) for row, own in losses.items()}
    mean = torch.cat(list(weights.values())).mean()
    floor = torch.cat(list(weights.values())) == torch.tensor(0.01)
    assert 0 < int(floor.sum()) < len(floor)
    expected = mean_over_rows(NEW, lambda row: losses[row] * weights[row] / mean)
    monkeypatch.setattr(batching.batched, "__defaults__", (tokens,))
    passes = len(list(batching.batched(NEW)))
    assert (passes > 1) == (tokens == 16)
    work = check(bound("talr", model, Material(new=NEW), strength), model, NEW, expected)
    assert (work.forward > 0) == (passes > 1)


def test_tokens_that_surprise_the_base_model_are_left_out() -> None:
    base = moved(tiny.lm(), 0.1)
    losses = {row: token_losses(base, row).detach() for row in NEW}
    limit = float(torch.cat(list(losses.values())).median())
    kept = {row: own <= max(limit, float(own.min())) for row, own in losses.items()}
    assert {int(k.sum()) < len(k) for k in kept.values()} == {True, False}
    assert any(float(own.min()) > limit for own in losses.values())  # a row that keeps its easiest token alone
    prepared = bound("stm", base, Material(new=NEW), math.exp(limit))
    base.load_state_dict(moved(base, 0.1, seed=2).state_dict())  # the choice stays the base model's
    check(prepared, base, NEW, mean_over_rows(NEW, lambda row: token_losses(base, row)[kept[row]]))
    row = Encoded((1, 2), (3, 4, 5), (True, False, True))  # a token that is not scored stays so
    check(bound("stm", base, Material(new=[row]), 1e6), base, [row], token_losses(base, row)[[0, 2]].mean())


def test_rows_are_weighted_by_how_easy_the_base_model_finds_them() -> None:
    model = moved(tiny.lm(), 0.1)
    found = torch.stack([token_losses(model, row).detach().mean() for row in NEW])
    weights = (-found / (0.5 * found.median())).exp()
    prepared = bound("flow", model, Material(new=NEW), 0.5)
    model.load_state_dict(moved(model, 0.1, seed=2).state_dict())
    some = [5, 0, 2]
    rows = [NEW[i] for i in some]
    each = torch.stack([token_losses(model, row).mean() for row in rows])
    check(prepared, model, rows, (each * weights[some]).mean())


@pytest.mark.parametrize(("name", "weighted"), [("kl-base", False), ("asft", True)])
def test_new_rows_are_held_to_the_frozen_models_predictions(name: str, weighted: bool) -> None:
    base = moved(tiny.lm(), 0.1)
    model = copy.deepcopy(base)
    prepared = bound(name, model, Material(new=NEW), 0.7)
    model.load_state_dict(moved(base, 0.1, seed=2).state_dict())

    def each(row: Encoded) -> Tensor:
        teacher, own, losses = chances(base, row).detach(), chances(model, row), token_losses(model, row)
        kl = (teacher.exp() * (teacher - own)).sum(1)
        return losses * ((-losses.detach()).exp() if weighted else 1.0) + 0.7 * kl

    work = check(prepared, model, NEW, mean_over_rows(NEW, each))
    assert work.forward == work.padded


def test_probes_are_distilled_and_new_rows_are_learned() -> None:
    base, material = moved(tiny.lm(), 0.1), tiny.material()
    model = copy.deepcopy(base)
    prepared = bound("probe-distillation", model, material, 0.7)
    model.load_state_dict(moved(base, 0.1, seed=2).state_dict())
    new, probes = material.rows("new")[:3], material.rows("probes")[:2]

    def each(row: Encoded) -> Tensor:
        if row in new:
            return token_losses(model, row)
        teacher = chances(base, row).detach()
        return 0.7 * (teacher.exp() * (teacher - chances(model, row))).sum(1)

    mixed = [probes[0], *new, probes[1]]
    work = check(prepared, model, mixed, mean_over_rows(mixed, each))
    assert (work.rows, 0 < work.forward < work.padded) == (5, True)
    check(prepared, model, probes, mean_over_rows(probes, each))


@pytest.mark.parametrize(("probes", "frozen"), [(3, False), (120, True)])
def test_beside_new_rows_the_divergence_of_kept_rows_is_small(probes: int, frozen: bool) -> None:
    base, longest = moved(tiny.lm(), 0.1), ANSWER_TOKENS + 4
    long = [Encoded((1, 2), tuple(range(longest))), *tiny.rows(probes, seed=5, longest_target=longest)]
    material = Material(new=NEW, past=(Past(name="past", probes=long),))
    kept = material.rows("beginnings")
    assert max(len(row.target) for row in long) > max(len(row.target) for row in kept) == ANSWER_TOKENS
    assert all(row.target == whole.target[:ANSWER_TOKENS] for row, whole in zip(kept, long, strict=True))
    model = copy.deepcopy(base)
    prepared = bound("divergence", model, material, 3.0)
    assert prepared.once.forward >= sum(map(len, kept))
    model.load_state_dict(moved(base, 0.1, seed=2).state_dict())

    def kl(row: Encoded) -> Tensor:
        teacher = chances(base, row).detach()
        return (teacher.exp() * (teacher - chances(model, row))).sum(1)

    new, two = NEW[:3], kept[:2]
    expected = mean_over_rows(new, lambda row: token_losses(model, row)) + 3.0 * mean_over_rows(two, kl)
    work = check(prepared, model, [new[0], two[0], *new[1:], two[1]], expected)
    assert (work.rows, work.forward > 0) == (5, frozen)  # the base model reads again only what is too large to store
    replayed = bound("self-replay", model, material, 3.0)
    each = [mean_over_rows(rows, lambda row: token_losses(model, row)) for rows in (new, two)]
    check(replayed, model, [*new, *two], each[0] + 3.0 * each[1])


def test_the_columns_with_the_largest_scores_do_not_move() -> None:
    model, material = moved(tiny.lm(), 0.1), tiny.material()
    sources = METHODS["ssu"].sources(material)
    [vector] = ColumnShield(model=model, sources=sources, strength=0.25)(list(model.parameters()), 0).vectors
    frozen = dict(zip([name for name, _ in model.named_parameters()], vector, strict=True))
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    assert len(layers) == 14
    seen: dict[str, Tensor] = dict.fromkeys(layers, torch.zeros(()))
    inputs: dict[str, list[Tensor]] = {}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, x, name=name: inputs.setdefault(name, []).append(x[0][0]))
    for source in sources:
        inputs.clear()
        for row in source.rows:
            model(torch.tensor([[*row.prompt, *row.target]]))
        for name in layers:
            seen[name] = seen[name] + source.weight * torch.cat(inputs[name]).square().mean(0)
    for name, layer in layers.items():
        scores, columns = layer.weight.detach().abs().sum(0) * seen[name].sqrt(), frozen.pop(f"{name}.weight")
        chosen = scores.argsort(descending=True)[: round(0.25 * len(scores))].tolist()
        assert columns[0].nonzero().flatten().tolist() == sorted(chosen)
        assert bool((columns == columns[0]).all())
    assert not any(bool(other.any()) for other in frozen.values())


def test_shielded_columns_stay_bit_for_bit_and_the_others_move() -> None:
    model, material = tiny.lm(), tiny.material()
    before = copied(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    prepared = prepare(METHODS["ssu"], optimizer, model, material, seed=0)
    sources = METHODS["ssu"].sources(material)
    [vector] = ColumnShield(model=model, sources=sources, strength=0.5)(list(model.parameters()), 0).vectors
    list(adapt(model, optimizer, prepared, schedule=Schedule(epochs=2, batch_size=4), seed=0))
    for (name, p), frozen in zip(model.named_parameters(), vector, strict=True):
        assert torch.equal(p[frozen > 0], before[name][frozen > 0])
        assert bool((p[frozen == 0] != before[name][frozen == 0]).any())
    bare = nn.Sequential(nn.Embedding(4, 2))
    with pytest.raises(ValueError, match=r"no torch\.nn\.Linear besides the head trains; choose another method"):
        ColumnShield(model=bare, sources=sources, strength=0.5)(list(bare.parameters()), 0)


def test_only_the_last_blocks_train() -> None:
    for strength, first in ((0.0, 0), (0.5, 1), (0.9, 1)):
        row = configured(METHODS["freeze-layers"], strength=strength)
        model = row.trained(tiny.lm(), 0)
        blocks = tuple(f"model.layers.{i}." for i in range(first, 2))
        assert all(p.requires_grad == name.startswith(blocks) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match="expected a model with a list of num_hidden_layers blocks, got Linear"):
        row.trained(nn.Linear(2, 2), 0)


def test_a_strength_without_meaning_is_refused() -> None:
    refused = {"ewc": -1.0, "kl-base": math.inf, "eaft": -0.1, "talr": 0.0, "stm": 0.0, "flow": -1.0, "ssu": 1.1,
               "freeze-layers": 1.0, "mofo": 0.0, "probe-distillation": math.nan, "distillation": -2.0,
               "wise-ft": 1.5, "cplus-curvature": 1.0}  # fmt: skip
    for name, strength in refused.items():
        with pytest.raises(ValueError, match=rf"must lie in [\[(]\d, (\d|inf)[\])], got {strength}"):
            configured(METHODS[name], strength=strength)
