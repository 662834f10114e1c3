"""Some rows of a parameter train and its others stay, bit for bit, whatever the optimizer does to them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import trained
from quadratic import Bag, PastEvidence, copies, past_gradient, proposing, same
from test_attach import EPOCH, OPTIMIZERS, STEPS, each_optimizer, set_gradients, train
from torch import Tensor, nn

from cplus.core import algorithm, kernels, optim
from cplus.core.gates import Collaborative
from cplus.core.guard import Guard, protect
from cplus.core.losses import answer_losses
from cplus.distributed.engines import Fragment, Zero
from cplus.integrations.transformers import preserve, scope

EMBEDDING = "model.embed_tokens.weight"
ROWS = {"weights.0": [3, 1], "weights.1": [0, 4]}  # of four rows of three coordinates, and of five coordinates
TRAINED = ((0, [1, 3]), (1, [0, 4]))
needs_compiler = pytest.mark.skipif(not kernels.can_compile("cpu"), reason="no C++ compiler on this machine")


def bits(p: Tensor) -> Tensor:
    """Bit patterns, which tell -0.0 from 0.0."""
    return p.detach().clone().view(torch.int32)


def bag_with_negative_zeros() -> Bag:
    bag = Bag(torch.float32)
    with torch.no_grad():
        bag.weights[0][0, 1] = bag.weights[1][2] = -0.0
    return bag


def guarded(name: str, only_rows: dict[str, list[int]] | None = None, **changes: Any) -> tuple[Bag, Any, Guard]:
    bag = bag_with_negative_zeros()
    optimizer = OPTIMIZERS[name][0](list(bag.weights)) if name in OPTIMIZERS else optim.AdamW(bag.weights, **OWN)
    settings = {"evidence": PastEvidence(), "gate": Collaborative(beta=0.9)} | changes
    return bag, optimizer, Guard(optimizer, bag, only_rows=ROWS if only_rows is None else only_rows, **settings)


OWN = {"lr": 0.01, "weight_decay": 0.1}


@each_optimizer
def test_the_update_of_the_other_rows_is_dropped_and_nothing_else_changes(name: str) -> None:
    bag, optimizer, guard = guarded(name)
    start = [bits(p) for p in bag.weights]
    twin = bag_with_negative_zeros()
    plain = OPTIMIZERS[name][0](list(twin.weights))

    def step(batch: int) -> None:
        theta = copies(twin.weights)
        set_gradients(twin, batch)
        plain.step()
        for i, rows in TRAINED:
            others = [row for row in range(len(theta[i])) if row not in rows]
            twin.weights[i].data[others] = theta[i][others]

    expected = algorithm.run(
        copies(twin.weights),
        epochs=[range(first, first + EPOCH) for first in range(1, STEPS + 1, EPOCH)],
        propose=proposing(list(twin.weights), step),
        anchor_gradient=past_gradient,
        probe_gradient=past_gradient,
        beta=0.9,
    )
    train(bag, optimizer, guard)
    assert same(bag.weights, expected)
    for i, rows in TRAINED:
        changed = (bits(bag.weights[i]) != start[i]).reshape(len(start[i]), -1).any(dim=1)
        assert changed.nonzero().flatten().tolist() == rows
    assert not torch.equal(bits(bag.weights[2]), start[2])


@needs_compiler
@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("name", ["one-pass", "adamw-fused"])
def test_the_compiled_passes_keep_the_other_rows_too(name: str, beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, optimizer, guard = guarded("adamw-fused", gate=Collaborative(beta=beta))
    train(plain, optimizer, guard)
    monkeypatch.setattr(kernels, "WORTH_COMPILING", 0)
    bag, optimizer, guard = guarded(name, gate=Collaborative(beta=beta))
    assert (guard.gating.compiled, guard.one_pass) == (True, name == "one-pass")
    start = [bits(p) for p in bag.weights]
    train(bag, optimizer, guard)
    for p, q in zip(bag.weights, plain.weights, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    for i, rows in TRAINED:
        others = [row for row in range(len(start[i])) if row not in rows]
        assert torch.equal(bits(bag.weights[i])[others], start[i][others])
    assert guard.step_nbytes == 4 * ((12 + 5) if name == "one-pass" else (12 + 5 + 6))


@pytest.mark.parametrize("name", [EMBEDDING, "lm_head.weight"])
def test_tied_embeddings_learn_new_tokens_by_either_name(name: str) -> None:
    model = tiny.lm()
    model.resize_token_embeddings(tiny.VOCABULARY + 2, mean_resizing=False)
    new = [tiny.VOCABULARY, tiny.VOCABULARY + 1]
    rows = [tiny.Encoded((1, 2, 3), (new[0],)), tiny.Encoded((new[0], 5), (new[1],))]
    before = {key: bits(p) for key, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    guard = protect(optimizer, model, anchors=tiny.rows(4), only_rows={name: new}, refresh_every=2)
    first = answer_losses(model, rows).mean().item()
    for _ in range(6):
        optimizer.zero_grad()
        answer_losses(model, rows).mean().backward()
        optimizer.step()
    assert answer_losses(model, rows).mean().item() < first
    now = {key: bits(p) for key, p in model.named_parameters()}
    assert torch.equal(now[EMBEDDING][: tiny.VOCABULARY], before[EMBEDDING][: tiny.VOCABULARY])
    assert (now[EMBEDDING][tiny.VOCABULARY :] != before[EMBEDDING][tiny.VOCABULARY :]).any(dim=1).all()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(not torch.equal(now[key], before[key]) for key in before)  # the rest of the model trains
    assert scope(model, guard).endswith(f"; of {EMBEDDING} only 2 of 42 rows train")


def test_the_trainer_trains_only_these_rows(tmp_path: Path) -> None:
    run = trained.trainer(tmp_path, weight_decay=0.1, max_grad_norm=1.0, num_train_epochs=1)
    start = bits(run.model.model.embed_tokens.weight)
    preserve(run, anchors=trained.ANCHORS, only_rows={EMBEDDING: range(30, 40)})
    run.train()
    now = bits(run.model.model.embed_tokens.weight)
    assert torch.equal(now[:30], start[:30])
    assert (now[30:] != start[30:]).any()
    with pytest.raises(ValueError, match=r"'model\.embed_tokens\.weight' has the rows 0 to 39, and only_rows names 40"):
        preserve(run, anchors=trained.ANCHORS, only_rows={EMBEDDING: [40]})


BAD = [
    ({"model.embed_token.weight": [1]}, ValueError, "no such parameter; did you mean 'model.embed_tokens.weight'"),
    ({"?": [1]}, ValueError, r"no such parameter; model\.named_parameters\(\) lists them"),
    ({EMBEDDING: [3, 40]}, ValueError, "has the rows 0 to 39, and only_rows names 40; after adding tokens, call"),
    ({EMBEDDING: [-1]}, ValueError, "has the rows 0 to 39, and only_rows names -1"),
    ({EMBEDDING: []}, ValueError, "no row to train; set requires_grad=False instead"),
    ({EMBEDDING: [True, False]}, TypeError, "whole numbers counted from 0, got True"),
    ({EMBEDDING: torch.tensor([0.5])}, TypeError, "whole numbers counted from 0, got 0.5"),
    ({EMBEDDING: 7}, TypeError, "must be a list of whole numbers counted from 0, got 7"),
    ({EMBEDDING: [1], "lm_head.weight": [2]}, ValueError, "different rows, but they are one tied parameter"),
    ({"model.norm.weight": [1]}, ValueError, "'model.norm.weight', which the optimizer does not train"),
]


@pytest.mark.parametrize(("only", "kind", "words"), BAD)
def test_bad_rows_are_named_before_the_first_step(only: Any, kind: type[Exception], words: str) -> None:
    model = tiny.lm()
    model.model.norm.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(kind, match=words):
        protect(optimizer, model, anchors=tiny.rows(2), only_rows=only)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_single_number_has_no_rows() -> None:
    module = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.0))})
    with pytest.raises(ValueError, match="'scale', which is a single number and has no rows"):
        Guard(torch.optim.SGD(module.parameters(), lr=0.1), module, evidence=PastEvidence(), only_rows={"scale": [0]})


def test_a_flat_partition_keeps_its_part_of_the_other_rows() -> None:
    """Rows 1 and 3 of a matrix of five rows of three train, in partitions that begin and end within a row."""
    engine = object.__new__(Zero)
    engine.deepspeed = SimpleNamespace(module=nn.ParameterDict({"v": torch.zeros(2), "w": torch.zeros(5, 3)}))
    engine.fragments = [Fragment("v", 0, 0, 0, 2), Fragment("w", 0, 0, 2, 8), Fragment("w", 8, 1, 1, 7)]
    partitions = [nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(8))]
    kept = {"w": [1, 3]}
    first, second = engine.held_still(kept, partitions).values()
    assert first.nonzero().flatten().tolist() == [2, 3, 4, 8, 9]  # coordinates 0 to 2 and 6 to 7 of w
    assert second.nonzero().flatten().tolist() == [1, 5, 6, 7]  # 8, and 12 to 14
    engine.fragments = engine.fragments[:1]
    assert engine.held_still(kept, partitions) == {}
