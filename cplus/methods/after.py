"""What a method does once training has ended: it changes the trained weights, with the base model's at hand."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from cplus.base.cost import Work
from cplus.core.rows import Encoded, batched, measured
from cplus.methods.objectives import Material, Rows

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cplus.methods.repair import Computing, Repaired


Outcome: TypeAlias = "tuple[Work, Repaired | str | None]"
"""The passes that were needed, and what a repair did, or why it did nothing; None where no repair was tried."""


class After(Protocol):
    """Applied once by the driver to the trained model, adapters merged, in evaluation mode."""

    @property
    def needs(self) -> tuple[Rows, ...]:
        """The kinds of past rows it requires."""
        ...

    def __call__(
        self, model: nn.Module, base: Mapping[str, Tensor], material: Material, computing: Computing = nullcontext
    ) -> Outcome:
        """Change the model's weights in place.

        `base` holds the base model's value of every parameter that was trained, by its name in the model. `computing`
        is opened anew for each pass: autocast remembers the weights it cast until its context ends, and they change.
        """
        ...


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter that training can change, by its name in the plain model: 4 bytes each in float32.

    With LoRA these are the frozen weights that the adapters are merged into.
    """
    unwrapped = getattr(model, "get_base_model", None)
    if unwrapped is None:
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    frozen = ((name, p) for name, p in unwrapped().named_parameters() if ".base_layer." in name)
    return {name.replace(".base_layer.", "."): p.detach().clone() for name, p in frozen}


@dataclass(frozen=True)
class Averaged:
    """Weights between the base model's and the trained ones.

    Source: Wortsman et al. 2022, WiSE-FT, Eq. 1.    theta = (1 - a) theta0 + a theta_tuned

    `strength` is a (the paper proposes 0.5 where nothing else is known). None chooses the smallest a of 0.1, 0.2, ...,
    1 with which every new row that the tuned model knows stays known.
    """

    strength: float | None = None
    needs: tuple[Rows, ...] = ()

    def __post_init__(self) -> None:
        if self.strength is not None and not 0.0 <= self.strength <= 1.0:
            raise ValueError(f"the strength of weight averaging must lie in [0, 1], got {self.strength}")

    def __call__(
        self, model: nn.Module, base: Mapping[str, Tensor], material: Material, computing: Computing = nullcontext
    ) -> Outcome:
        """Keep the tuned weights, then move along the line; at a = 1 they are unchanged, bit for bit."""
        tuned = {name: p.detach().clone() for name, p in model.named_parameters() if name in base}
        if self.strength is not None:
            move(model, base, tuned, self.strength)
            return Work(), None
        with computing():
            known, work = known_rows(model, material)
        for tenths in range(1, 11) if known else (10,):
            move(model, base, tuned, tenths / 10)
            if tenths == 10:
                break
            with computing():
                found, passed = known_rows(model, material)
            work += passed
            if known <= found:
                break
        return work, None


def move(model: nn.Module, base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], share: float) -> None:
    """Set every parameter to the base model's plus `share` of what training added, exact at both ends."""
    import torch

    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in base:
                p.copy_(torch.lerp(base[name].to(p.device), tuned[name], share))


def known_rows(model: nn.Module, material: Material) -> tuple[set[Encoded], Work]:
    """The new rows that a model knows, and the forward passes that this took.

    A row with choices is known if its target is the best of them by mean token log-likelihood, as Acquisition counts
    it; any other if each of its target tokens is the likeliest one after those before it.
    """
    from cplus.models.scoring import read_targets, score_candidates

    choices = {row: own for row in material.new if len(own := material.choices.get(row, ())) > 1}
    scores = score_candidates(model, [row.prompt for row in choices], list(choices.values()), what="known rows")
    known = {
        row
        for (row, own), found in zip(choices.items(), scores, strict=True)
        if own[max(range(len(own)), key=lambda i: found[i].mean)] == row.target
    }
    others = [row for row in material.new if row not in choices]
    readings = read_targets(model, others, what="known rows")
    known |= {row for row, reading in zip(others, readings, strict=True) if reading.likeliest}
    passed = sum(len(row.prompt) + sum(map(len, own)) for row, own in choices.items())
    return known, Work(forward=passed + sum(measured(part).padded for part in batched(others)))


@dataclass(frozen=True)
class Undone:
    """Weights reset to the base model's, those that past rows need most against new ones (`cplus.methods.repair`).

    `points` is how many percentage points of new rows with choices may become unknown (`known_rows`); the loss of free
    text, and of rows with choices of which the tuned model knows less than half, may rise by 5 % of its fall instead,
    on at most 64 of them.
    Weights are ranked by importance where rows have choices, else by blame. Where nothing can be undone they stay.
    """

    points: float = 1.0
    needs: tuple[Rows, ...] = ("anchors", "probes")

    def __post_init__(self) -> None:
        if not 0.0 <= self.points <= 100.0:
            raise ValueError(f"the points of Acquisition to give up must lie in [0, 100], got {self.points}")

    def __call__(
        self, model: nn.Module, base: Mapping[str, Tensor], material: Material, computing: Computing = nullcontext
    ) -> Outcome:
        """Squared gradients of all rows, or a gradient of the past rows, then a search for the share."""
        from cplus.methods.repair import TRIALS, Check, Unrepairable, judged, loss_check, repair_model

        past, new = [*material.rows("anchors"), *material.rows("probes")], list(material.new)
        read = Work()

        def unknown(model: nn.Module) -> float:
            nonlocal read
            known, passed = known_rows(model, material)
            read += passed
            return 100 * sum(row not in known for row in new) / len(new)

        free = not any(len(own) > 1 for own in material.choices.values())
        check = Check(name="new", unit="% not known", measure=unknown, tolerance=self.points)
        with computing():
            by_loss = free or unknown(model) > 50.0
        weights = {name: base.get(name, p.detach()) for name, p in model.named_parameters()}
        batches = batched(past) if free else ([row] for row in (*past, *new))
        work = sum(map(measured, batches), Work())
        found: Repaired | str
        try:
            found = repair_model(
                model,
                weights,
                past,
                new,
                checks=[loss_check(judged(new)) if by_loss else check],
                by="blame" if free else "importance",
                computing=computing,
            )
            tried = found.trials
        except Unrepairable as error:
            found, tried = str(error), TRIALS
        # Past rows are read by base, tuned and repaired model, new rows by base and tuned model and at every trial.
        readings = ((3, past), (2 + tried, judged(new) if by_loss else []))
        passes = sum(count * measured(part).padded for count, rows in readings for part in batched(rows))
        return work + read + Work(forward=passes), found
