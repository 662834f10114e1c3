"""What a method does once training has ended: it changes the trained weights, with the base model's at hand.

Called once by the driver with the trained model, adapters merged, in evaluation mode; `base` holds the base model's
value of every parameter that was trained. `computing` is opened anew for each pass: autocast remembers the weights it
cast until its context ends, and they change.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn

from cplus.base.cost import Work
from cplus.core.rows import Encoded, batched, measured
from cplus.methods import repair
from cplus.methods.repair import Computing, Repaired
from cplus.methods.table import Material
from cplus.models.scoring import log_likelihoods, score_candidates

Outcome: TypeAlias = tuple[Work, Repaired | str | None]
"""The passes that were needed, and what a repair did, or why it did nothing; None where no repair was tried."""


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter that training can change, by its name in the plain model: 4 bytes each in float32.

    With LoRA these are the frozen weights that the adapters are merged into.
    """
    unwrapped = getattr(model, "get_base_model", None)
    if unwrapped is None:
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    frozen = ((name, p) for name, p in unwrapped().named_parameters() if ".base_layer." in name)
    return {name.replace(".base_layer.", "."): p.detach().clone() for name, p in frozen}


def known_rows(model: nn.Module, material: Material) -> tuple[set[Encoded], Work]:
    """The new rows that a model knows, and the forward passes that this took.

    A row with choices is known if its target is the best of them by mean token log-likelihood, as Acquisition counts
    it; any other if each of its target tokens is the likeliest one after those before it.
    """
    choices = {row: own for row in material.new if len(own := material.choices.get(row, ())) > 1}
    scores = score_candidates(model, [row.prompt for row in choices], list(choices.values()), what="known rows")
    known = {
        row
        for (row, own), found in zip(choices.items(), scores, strict=True)
        if own[max(range(len(own)), key=lambda i: found[i].mean)] == row.target
    }
    others = [row for row in material.new if row not in choices]
    found = log_likelihoods(model, others, what="known rows")
    known |= {row for row, score in zip(others, found, strict=True) if score.likeliest}
    passed = sum(len(row.prompt) + sum(map(len, own)) for row, own in choices.items())
    return known, Work(forward=passed + sum(measured(part).padded for part in batched(others)))


def averaged(
    model: nn.Module,
    base: Mapping[str, Tensor],
    material: Material,
    computing: Computing = nullcontext,
    strength: float | None = None,
) -> Outcome:
    """Weights between the base model's and the trained ones; at a = 0 and 1 they are these, bit for bit.

    Source: Wortsman et al. 2022, WiSE-FT, Eq. 1.    theta = (1 - a) theta0 + a theta_tuned

    `strength` is a (the paper proposes 0.5 where nothing else is known). None chooses the smallest a of 0.1, 0.2, ...,
    1 with which every new row that the tuned model knows stays known.
    """
    pairs = [(p, base[name].to(p.device), p.detach().clone()) for name, p in model.named_parameters() if name in base]

    @torch.no_grad()
    def move(share: float) -> None:
        for p, before, after in pairs:
            p.copy_(torch.lerp(before, after, share))

    if strength is not None:
        move(strength)
        return Work(), None
    with computing():
        known, work = known_rows(model, material)
    for tenths in range(1, 10) if known else ():
        move(tenths / 10)
        with computing():
            found, passed = known_rows(model, material)
        work += passed
        if known <= found:
            return work, None
    move(1.0)
    return work, None


def repaired(
    model: nn.Module, base: Mapping[str, Tensor], material: Material, computing: Computing = nullcontext
) -> Outcome:
    """Weights reset to the base model's, those that past rows need most; where nothing can be undone they stay.

    One percentage point of new rows with choices may become unknown (`known_rows`); the loss of free text, and of rows
    with choices of which the tuned model knows less than half, may rise by 5 % of its fall instead, on at most 64 of
    them. Weights are ranked by importance where rows have choices, else by blame.
    """
    past, new = [*material.rows("anchors"), *material.rows("probes")], list(material.new)
    read = Work()

    def unknown(model: nn.Module) -> float:
        nonlocal read
        known, passed = known_rows(model, material)
        read += passed
        return 100 * sum(row not in known for row in new) / len(new)

    free = not any(len(own) > 1 for own in material.choices.values())
    with computing():
        by_loss = free or unknown(model) > 50.0
    few = repair.judged(new) if by_loss else []
    check = repair.loss_check(few)
    if not by_loss:
        check = repair.Check(name="new", unit="% not known", measure=unknown, tolerance=repair.POINTS)
    weights = {name: base.get(name, p.detach()) for name, p in model.named_parameters()}
    work = sum(map(measured, batched(past) if free else ([row] for row in (*past, *new))), Work())
    found: Repaired | str
    try:
        by: repair.By = "blame" if free else "importance"
        found = repair.repair_model(model, weights, past, new, checks=[check], by=by, computing=computing)
        tried = found.trials
    except repair.Unrepairable as error:
        found, tried = str(error), repair.TRIALS
    # Past rows are read by base, tuned and repaired model, new rows by base and tuned model and at every trial.
    passes = sum(
        count * measured(part).padded for count, rows in ((3, past), (2 + tried, few)) for part in batched(rows)
    )
    return work + read + Work(forward=passes), found
