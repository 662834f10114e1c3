"""The contract every row of the table keeps, under three optimizers."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable

import pytest
import tiny
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from cplus.core.losses import answer_losses
from cplus.methods.adapters import merged
from cplus.methods.table import METHODS, Material, Method, configured, method
from cplus.training import driver
from cplus.training.loop import (
    Cursor,
    EpochEnded,
    Event,
    Prepared,
    Refreshed,
    Schedule,
    Stepped,
    adapt,
    epoch_batches,
    prepare,
)
from cplus.training.settings import TrainSettings

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
}
SCHEDULE = Schedule(epochs=3, batch_size=4, order="shuffled")
NEW = tiny.rows(10, seed=4)
LEFT = {"osf": 0.9992, "lora": 0.985, "freeze-layers": 0.985, "cplus-curvature": 0.995, "asft": 0.993}
"""The share of the loss that may be left: these move few weights, or all of them little. Else at most 0.892 was."""

contract = pytest.mark.parametrize("name", METHODS)
each_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def start(row: Method, kind: str, material: Material) -> tuple[nn.Module, Optimizer, Prepared]:
    model = row.trained(tiny.lm(), 5)
    optimizer = OPTIMIZERS[kind](model)
    return model, optimizer, prepare(row, optimizer, model, material, seed=5)


def train(row: Method, kind: str, material: Material, schedule: Schedule = SCHEDULE) -> tuple[nn.Module, list[Event]]:
    model, optimizer, prepared = start(row, kind, material)
    events = list(adapt(model, optimizer, prepared, schedule=schedule, seed=5))
    prepared.finish(model)
    return model, events


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def mean_loss(model: nn.Module, material: Material) -> float:
    with torch.no_grad():
        return float(answer_losses(model, material.new).mean())


def suited(name: str) -> Method:
    """The row; with random weights every token's perplexity is near 40, and little would be left to learn at 2.5.

    Kept rows weigh as much as new ones: the rates here are chosen for one loss.
    """
    row = method(name)
    weight = {"stm": 1e3, "self-replay": 1.0, "divergence": 1.0, "divergence-cplus": 1.0}.get(name)
    return configured(row, strength=weight)


@contract
@each_optimizer
def test_learns_resumes_bitwise_and_leaves_no_hook(name: str, kind: str) -> None:
    material, row = tiny.material(), suited(name)
    model, optimizer, prepared = start(row, kind, material)
    losses, events = [mean_loss(model, material)], []
    for event in adapt(model, optimizer, prepared, schedule=SCHEDULE, seed=5):
        events.append(event)
        if isinstance(event, EpochEnded):
            losses.append(mean_loss(model, material))
        if isinstance(event, Stepped) and event.step == 5:  # inside an epoch
            guard = prepared.guard
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), guard and guard.state_dict()))
            cursor = Cursor(epoch=event.epoch, batch=event.batch, step=event.step)
    # Of the new rows: a weighted objective itself need not fall. With momentum some have risen again at the end.
    assert min(losses) < losses[0] * LEFT.get(name, 0.95)
    assert_uses_exactly_the_data_it_declares(row, events)
    prepared.finish(model)

    other, other_optimizer, other_prepared = start(row, kind, material)
    other.load_state_dict(kept[0])
    other_optimizer.load_state_dict(kept[1])
    if other_prepared.guard is not None:
        other_prepared.guard.load_state_dict(kept[2])
    list(adapt(other, other_optimizer, other_prepared, schedule=SCHEDULE, seed=5, start=cursor))
    other_prepared.finish(other)
    assert same(model, other)

    if prepared.guard is not None:
        prepared.guard.detach()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    # OSF's own hooks project the gradient as long as its adapters are there, and go with them.
    plain = merged(model)
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in plain.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in plain.modules())
    assert {name for name, _ in plain.named_parameters()} == {name for name, _ in tiny.lm().named_parameters()}


def assert_uses_exactly_the_data_it_declares(row: Method, events: list[Event]) -> None:
    steps = [e for e in events if isinstance(e, Stepped)]
    assert len(steps) == 9  # ceil(10 / 4) updates in each of three epochs, for every method
    new, anchors, probes, synthetic = 10, 4, 6, 5
    expected = {
        ("new",): new,
        ("new", "anchors"): 2 * new,
        ("new", "probes"): new + probes,
        ("new", "probes", "anchors"): new + 2 * probes,
        ("new", "synthetic"): new + synthetic,
        ("new", "beginnings"): new,
    }[row.train_on]
    per_step = anchors if row.name == "distillation" else 1 if row.share else 0
    assert sum(e.work.rows for e in steps) == 3 * (expected + 3 * per_step)
    refreshes = [e for e in events if isinstance(e, Refreshed)]
    assert len(refreshes) == {"once": 1, "epoch": 3}.get(str(row.refresh), 9) * bool(row.evidence)
    assert sum(isinstance(e, EpochEnded) for e in events) == 3
    if row.parts == 4:
        assert [e.work.rows for e in refreshes] == [anchors + part for part in (2, 2, 1)]  # quarters of six probes
    if row.evidence and row.name != "cplus-cvar" and row.parts == 1:
        size = {"anchors": anchors, "probes": probes, "constant": probes, "balanced": probes}
        counted = 0 if row.refresh == "once" else sum(size[kind] for _, kind in row.evidence)
        assert {e.work.rows for e in refreshes} == {counted}  # what is taken once is outside the ledger


@contract
def test_missing_rows_are_named(name: str) -> None:
    row = method(name)
    for kind in row.needs:
        if kind == "new":
            continue
        source = "probes" if kind in ("constant", "balanced", "beginnings") else kind
        past = dataclasses.replace(tiny.material().past[0], **{source: ()})
        model = tiny.lm()
        optimizer = OPTIMIZERS["sgd"](model)
        with pytest.raises(ValueError, match=f"method '{name}' needs (beginnings|{kind}) and got none"):
            prepare(row, optimizer, model, dataclasses.replace(tiny.material(), past=(past,)), seed=0)
        assert not optimizer._optimizer_step_pre_hooks


def test_cpl_is_cplus_without_smoothing_and_with_one_source() -> None:
    material = tiny.material()
    variant = dataclasses.replace(METHODS["cplus-no-ema"], evidence=((1.0, "anchors"),))
    assert same(train(METHODS["cpl"], "adamw", material)[0], train(variant, "adamw", material)[0])


def test_distillation_with_zero_weight_is_sft_bitwise() -> None:
    material = tiny.material()
    variant = configured(METHODS["distillation"], strength=0.0)
    assert same(train(METHODS["sft"], "adamw", material)[0], train(variant, "adamw", material)[0])


def test_elastic_weights_add_the_penaltys_gradient() -> None:
    model, material = tiny.lm(), tiny.material()
    anchors, weight = material.rows("anchors"), 7.0
    backward = configured(METHODS["ewc"], strength=weight).objective(model, material)
    fisher = [torch.zeros_like(p) for p in model.parameters()]
    for row in anchors:
        model.zero_grad()
        answer_losses(model, [row]).mean().backward()
        for f, p in zip(fisher, model.parameters(), strict=True):
            f += p.grad**2 / len(anchors)
    base = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    model.zero_grad()
    moved = [(p - b).square() * f for p, b, f in zip(model.parameters(), base, fisher, strict=True)]
    expected = answer_losses(model, material.new).mean() + weight / 2 * sum(m.sum() for m in moved)
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss, _ = backward(material.new)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    for p, g in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "new", "probes", "anchors", "updates"),
    [("replay", 10, 6, 10, 3), ("anchor-probe-replay", 4, 20, 20, 1), ("anchor-probe-replay", 20, 7, 7, 5)],
)
def test_replay_repeats_anchors_to_equal_weight(name: str, new: int, probes: int, anchors: int, updates: int) -> None:
    material = tiny.material(new=new, anchors=3, probes=probes)
    batches = epoch_batches(METHODS[name], material, SCHEDULE, seed=0, epoch=1)
    counts = Counter(id(row) for batch in batches for row in batch)
    times = [counts[id(row)] for row in material.past[0].anchors]
    assert (len(batches), sum(times)) == (updates, anchors)
    assert max(times) - min(times) <= 1
    assert all(counts[id(row)] == 1 for row in material.new)


def test_kept_rows_come_in_turn_beside_the_batches_of_sft() -> None:
    row, material = METHODS["divergence"], tiny.material(new=20, probes=7)
    schedule = Schedule(epochs=5, batch_size=16, order="shuffled")
    kept = []
    for epoch in range(1, 6):
        batches = epoch_batches(row, material, schedule, seed=3, epoch=epoch)
        plain = epoch_batches(METHODS["sft"], material, schedule, seed=3, epoch=epoch)
        assert [len(batch) for batch in batches] == [16 + 2, 4 + 1]  # an eighth, and at least one
        assert [batch[: len(own)] for batch, own in zip(batches, plain, strict=True)] == plain
        kept += [one for batch, own in zip(batches, plain, strict=True) for one in batch[len(own) :]]
    turns = [kept[:7], kept[7:14]]
    assert [Counter(turn) for turn in turns] == [Counter(material.rows("beginnings"))] * 2
    assert turns[0] != turns[1]
    again = epoch_batches(row, material, schedule, seed=3, epoch=5)  # a resumed run begins here
    assert again == batches != epoch_batches(row, material, schedule, seed=4, epoch=5)


def test_past_tasks_weigh_the_same() -> None:
    past = tiny.material().past[0]
    two = dataclasses.replace(tiny.material(), past=(past, dataclasses.replace(past, name="older")))
    sources = METHODS["cplus"].sources(two)
    assert [s.weight for s in sources] == [0.25] * 4
    assert [s.name for s in sources] == ["past anchors", "past probes", "older anchors", "older probes"]


def test_file_order_and_batch_one_is_the_papers_protocol() -> None:
    material = tiny.material()
    batches = epoch_batches(METHODS["cplus"], material, Schedule(epochs=1), seed=0, epoch=1)
    assert [batch[0] for batch in batches] == list(material.new)


def test_empty_new_data_and_a_nan_loss_are_errors() -> None:
    with pytest.raises(ValueError, match="no new data to learn"):
        Material(new=[])
    model, optimizer, prepared = start(METHODS["sft"], "adamw", tiny.material())
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1; the parameters are unchanged"):
        list(adapt(model, optimizer, prepared, schedule=SCHEDULE, seed=0))
    after = model.state_dict()
    assert all(torch.equal(before[k].nan_to_num(), after[k].nan_to_num()) for k in before)


@pytest.mark.parametrize("name", ["lora", "osf"])
def test_adapter_rows_train_adapters_alone_and_merge_to_what_they_say(name: str) -> None:
    base, row = tiny.lm(), METHODS[name]
    frozen = {key: p.detach().clone() for key, p in base.named_parameters()}
    model = row.trained(base, 5)
    assert all(("lora_" in key or "osf_" in key) == p.requires_grad for key, p in model.named_parameters())
    torch.testing.assert_close(answer_losses(model, NEW), answer_losses(tiny.lm(), NEW))  # it begins as the base model
    model, _ = train(row, "sgd", tiny.material())
    said = answer_losses(model.eval(), NEW).detach()
    plain = merged(model)
    torch.testing.assert_close(answer_losses(plain, NEW).detach(), said, rtol=1e-4, atol=1e-5)
    moved = {key for key, p in plain.named_parameters() if not torch.equal(p, frozen[key])}
    assert moved
    assert all("_proj" in key for key in moved)  # linear layers, and neither embeddings nor norms


def test_the_large_singular_directions_stay_under_osf_and_gradient_descent() -> None:
    before = dict(tiny.lm().named_parameters())
    plain = merged(train(METHODS["osf"], "sgd", tiny.material())[0])
    for key, p in plain.named_parameters():
        if "_proj" not in key:
            continue
        u, s, v = torch.linalg.svd(before[key].detach(), full_matrices=False)
        half = len(s) // 2
        kept = u[:, :half].T @ p.detach() @ v[:half].T
        torch.testing.assert_close(kept, torch.diag(s[:half]), rtol=0, atol=1e-5)


def test_a_row_that_needs_peft_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    for name in ("lora", "osf"):
        with pytest.raises(ImportError, match=r"needs the package peft: pip install 'cplus\[peft\]'"):
            METHODS[name].trained(tiny.lm(), 0)


@contract
def test_every_row_computes_in_bfloat16_with_float32_weights(name: str) -> None:
    """What acts after training is included: the driver gives every pass its own autocast."""
    material, base, found = tiny.material(), tiny.lm(), {}
    rows = [*material.new, *material.past[0].anchors]
    with torch.no_grad():
        before = answer_losses(base, rows)
        for dtype in ("float32", "bfloat16"):
            settings = TrainSettings(
                method=name, epochs=3, lr=1e-2, batch_size=4, order="file", warmup_steps=0, compute_dtype=dtype
            )
            with torch.enable_grad():
                training = driver.start(settings, settings.row, copy.deepcopy(base), material)
                for _ in training.run():
                    pass
                model = training.finish()
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            found[dtype] = answer_losses(model, rows) - before
    assert not torch.equal(found["bfloat16"], found["float32"])
    assert torch.cosine_similarity(found["bfloat16"], found["float32"], dim=0) > 0.95
