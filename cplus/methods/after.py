"""What a method does once training has ended: it changes the trained weights, with the base model's at hand."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from cplus.base.cost import Work
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
        from cplus.methods.repair import known_rows

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


@dataclass(frozen=True)
class Undone:
    """Weights reset to the base model's, those that past rows need most; where nothing can be undone they stay."""

    needs: tuple[Rows, ...] = ("anchors", "probes")

    def __call__(
        self, model: nn.Module, base: Mapping[str, Tensor], material: Material, computing: Computing = nullcontext
    ) -> Outcome:
        """Repair the model."""
        from cplus.methods.repair import repair_material

        return repair_material(model, base, material, computing)
