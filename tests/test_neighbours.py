"""Rows of other people's methods against computations by hand."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from torch import nn

from cplus.after import Averaged, base_weights, known_rows
from cplus.data.encoded import Encoded
from cplus.loop import Schedule, adapt, prepare
from cplus.methods import METHODS, Material
from cplus.selection import configured


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
        work = Averaged(strength=share)(found, base, material)
        assert work.forward == 0
        for name, p in found.named_parameters():
            ends = base[name], dict(tuned.named_parameters())[name]
            torch.testing.assert_close(p, (1 - share) * ends[0] + share * ends[1])
            assert share not in (0.0, 1.0) or torch.equal(p, ends[int(share)])


def test_the_smallest_share_that_keeps_every_known_row_is_chosen() -> None:
    model, rows = tiny.lm(), tiny.rows(12, seed=3)
    tuned = moved(model, 0.3)
    # Rows that the tuned model repeats and the base model does not: its own likeliest token as the target.
    new = [Encoded(row.prompt, (likeliest(tuned, row),)) for row in rows]
    new = [row for row in new if likeliest(model, row) != row.target[0]]
    known, _ = known_rows(tuned, new)
    assert known == set(new)
    base, found = base_weights(model), copy.deepcopy(tuned)
    work = Averaged()(found, base, Material(new=new))
    keeps = []
    for tenths in range(1, 11):
        other = copy.deepcopy(tuned)
        Averaged(strength=tenths / 10)(other, base, Material(new=new))
        keeps.append(all(likeliest(other, row) == row.target[0] for row in new))
    first = keeps.index(True)
    assert 0 < first < 9
    expected = copy.deepcopy(tuned)
    Averaged(strength=(first + 1) / 10)(expected, base, Material(new=new))
    assert all(torch.equal(p, q) for p, q in zip(found.parameters(), expected.parameters(), strict=True))
    assert work.padded == 0
    assert work.forward >= (first + 2) * sum(map(len, new))  # the tuned model and every share tried


def test_a_model_that_knows_no_new_row_is_left_as_it_is() -> None:
    model = tiny.lm()
    tuned = moved(model, 0.3)
    new = [Encoded(row.prompt, ((likeliest(tuned, row) + 1) % tiny.VOCABULARY,)) for row in tiny.rows(4)]
    found = copy.deepcopy(tuned)
    Averaged()(found, base_weights(model), Material(new=new))
    assert all(torch.equal(p, q) for p, q in zip(found.parameters(), tuned.parameters(), strict=True))


def test_low_rank_adapters_are_averaged_as_merged_weights() -> None:
    pytest.importorskip("peft")
    from cplus import adapters

    plain = tiny.lm()
    model = adapters.lora(copy.deepcopy(plain), 0)
    row = configured(METHODS["wise-ft"], strength=0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    prepared = prepare(row, optimizer, model, tiny.material(), seed=0)
    list(adapt(model, optimizer, prepared, schedule=Schedule(epochs=2), seed=0))
    found = adapters.merged(model)
    tuned = {name: p.detach().clone() for name, p in found.named_parameters()}
    prepared.finish(found)
    apart = 0
    for name, p in plain.named_parameters():
        torch.testing.assert_close(dict(found.named_parameters())[name], 0.75 * p + 0.25 * tuned[name])
        apart += not torch.equal(p, tuned[name])
    assert apart == 14  # seven linear layers in each of two blocks


def test_a_share_outside_the_line_is_refused() -> None:
    with pytest.raises(ValueError, match=r"strength of weight averaging must lie in \[0, 1\], got 1.5"):
        configured(METHODS["wise-ft"], strength=1.5)


def likeliest(model: nn.Module, row: Encoded) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([row.prompt])).logits[0, -1].argmax())
