"""Gates: they map an optimizer's proposal to coefficients in [0, 1] and do nothing else.

A gate never writes a parameter. The guard (`algorithm.apply`) or a kernel tested against it applies the coefficients,
so a probe can attenuate an update but never introduce, amplify or reverse one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from cplus.core import algorithm, kernels
from cplus.core.kernels import Signs

Uses: TypeAlias = Literal["nothing", "signs", "values", "coefficients"]
"""What a gate reads of the evidence: nothing, the signs (kept in two bits per coordinate), the gradient itself, or
coefficients in bfloat16 that are applied as they are."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The step of one tensor, or of small ones in one buffer: values before and after, what is known of the change.

    `g_hat` is the evidence, None for a gate that reads none. `gradient` is the gradient of the new data after clipping
    and projection, `momentum` the optimizer's first moment (the gradient if the optimizer keeps none, None if it cannot
    be read); both are None for a parameter without a gradient in this step, and for the paper's gate, which does not
    read them. `position` is the tensor's place among all: ZeRO steps them one at a time.
    """

    theta: Tensor
    proposed: Tensor
    g_hat: Tensor | Signs | None = None
    gradient: Tensor | None = None
    momentum: Tensor | None = None
    position: int = 0

    @property
    def sign(self) -> Tensor:
        """The evidence, or its signs if only those are stored; unpacked at each call to save memory."""
        assert self.g_hat is not None, "a gate that reads evidence must declare it in `uses`"
        return self.g_hat.unpacked() if isinstance(self.g_hat, Signs) else self.g_hat

    @property
    def delta(self) -> Tensor:
        """What the optimizer wants to add; computed at each call to save memory."""
        return self.proposed - self.theta


class Gate:
    """Yields one coefficient tensor per proposal, in order, and owns the state needed for it; this one has none.

    `uses` is how much of the evidence the gate reads. `whole` is True for a gate that compares coordinates with one
    another and therefore cannot be sharded. `average` is the moving average of a gate that has a compiled form, None
    for other gates.
    """

    uses: Uses = "values"
    whole = True
    average: Average | None = None

    def coefficients(self, proposals: Sequence[Proposal]) -> Iterator[Tensor]:
        """One step's coefficients; the gate gets all proposals of the step and may read them twice."""
        raise NotImplementedError

    def applied(self, proposal: Proposal) -> Tensor:
        """The coefficients that a compiled pass has applied to one tensor."""
        raise NotImplementedError

    def tally(self) -> tuple[int, int]:
        """The number of coordinates with mask 1 and of all coordinates since the last call; (0, 0) if not counted."""
        return 0, 0

    @property
    def nbytes(self) -> int:
        """The memory held between steps."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs to continue bit for bit."""
        return {}

    def load_state_dict(self, state: dict[str, Any], params: Sequence[Tensor]) -> None:
        """Restore a saved state on the devices of the parameters, or of their shards."""


class Average:
    """The mask's moving average over steps. With beta = 0 it is the mask itself and needs no memory.

    `layout` says which tensors are processed together; without it each one is alone. `units` holds the averages so,
    `tensors` gives them one by one.
    """

    def __init__(self, beta: float, kind: kernels.EmaType) -> None:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"beta must lie in [0, 1), got {beta}")
        if kind not in ("float32", "bfloat16", "uint8"):
            raise ValueError(f"the moving average must be float32, bfloat16 or uint8, got {kind!r}")
        self.beta, self.kind = beta, kind
        self.step = 0
        self.layout: kernels.Layout | None = None
        self.units: list[Tensor] = []

    @property
    def tensors(self) -> list[Tensor]:
        """The average of each tensor; none before the first step."""
        return self.layout.separate(self.units) if self.layout and self.units else self.units

    @tensors.setter
    def tensors(self, averages: list[Tensor]) -> None:
        self.units = self.layout.joined(averages) if self.layout and averages else averages

    def allocate(self, units: Sequence[Tensor]) -> None:
        """Create the average before the first step, unless beta = 0."""
        if self.beta:
            self.units += [kernels.zeros(own, self.kind) for own in units[len(self.units) :]]

    def advance(self, unit: int, mask: Tensor) -> Tensor:
        """Lines 11-12 of Algorithm 1 for one unit; `step` must already count this step."""
        if not self.beta:  # the average is the mask and its correction is 1
            return mask
        average = algorithm.smooth(kernels.read(self.units[unit]), mask, self.beta)
        self.units[unit] = kernels.stored(average, self.units[unit])
        return self.coefficient(self.units[unit])

    def coefficient(self, average: Tensor) -> Tensor:
        """The coefficients that the last step applied to a tensor with this average."""
        return algorithm.coefficient(kernels.read(average), self.beta, self.step)


class Collaborative(Gate):
    """The paper's gate: the sign mask, smoothed over steps. beta = 0 with anchors alone is CPL."""

    uses: Uses = "signs"
    whole = False
    average: Average

    def __init__(self, *, beta: float, ema: kernels.EmaType = "float32") -> None:
        self.average = Average(beta, ema)
        self._admitted: Tensor | None = None
        self._offered = 0

    def coefficients(self, proposals: Sequence[Proposal]) -> Iterator[Tensor]:
        """Lines 10-12 of Algorithm 1, one tensor at a time."""
        average, first = self.average, proposals[0].position
        average.allocate([*average.units[:first], *(proposal.theta for proposal in proposals)])
        average.step += first == 0
        for i, proposal in enumerate(proposals, start=first):
            mask = algorithm.collaborates(proposal.sign, proposal.delta)
            self._count(mask)
            yield average.advance(i, mask)

    def applied(self, proposal: Proposal) -> Tensor:
        """The coefficients of the average that the pass has stored; without an average, the mask."""
        if not self.average.beta:
            return algorithm.collaborates(proposal.sign, proposal.delta)
        return self.average.coefficient(self.average.tensors[proposal.position])

    def tally(self) -> tuple[int, int]:
        """The number of coordinates with mask 1 and of all coordinates, over the steps since the last call."""
        counted = (0 if self._admitted is None else int(self._admitted), self._offered)
        self._admitted, self._offered = None, 0
        return counted

    def _count(self, mask: Tensor) -> None:
        # The sum stays on the device: reading it at every step would make the host wait.
        count = mask.count_nonzero()
        self._admitted = count if self._admitted is None else self._admitted + count.to(self._admitted.device)
        self._offered += mask.numel()

    @property
    def nbytes(self) -> int:
        """The moving average."""
        return sum(e.nbytes for e in self.average.units)

    def state_dict(self) -> dict[str, Any]:
        """The step count and the moving average."""
        return {"step": self.average.step, "ema": [e.clone() for e in self.average.tensors]}

    def load_state_dict(self, state: dict[str, Any], params: Sequence[Tensor]) -> None:
        """Restore a saved step count and moving average."""
        kept = state["ema"]
        if kept and [e.shape for e in kept] != [p.shape for p in params]:
            raise ValueError("the saved gate state belongs to parameters of other shapes; load the one of this model")
        self.average.step = int(state["step"])
        self.average.tensors = [e.to(p.device, copy=True) for e, p in zip(kept, params, strict=False)]


class Elementwise(Gate):
    """A stateless gate: a pure function from a proposal to its coefficients.

    `uses` is how much of the evidence the function reads. `whole=False` means that each coefficient depends on its own
    coordinate alone, so that a shard of a tensor can be gated by itself.
    """

    def __init__(self, function: Callable[[Proposal], Tensor], *, uses: Uses = "values", whole: bool = True) -> None:
        self.function, self.uses, self.whole = function, uses, whole

    def coefficients(self, proposals: Sequence[Proposal]) -> Iterator[Tensor]:
        """The function's values; a value outside [0, 1] would not attenuate and is refused."""
        for proposal in proposals:
            c = self.function(proposal)
            inside = ((c >= 0) & (c <= 1)).all()
            if c.shape != proposal.theta.shape or (c.is_cpu and not inside):
                raise ValueError(
                    f"a gate's coefficients must lie in [0, 1], one for each of {tuple(proposal.theta.shape)} "
                    f"coordinates, got {tuple(c.shape)} from {float(c.min()):g} to {float(c.max()):g}"
                )
            torch._assert_async(inside)  # refuses them on a device without waiting for it
            yield c

    def applied(self, proposal: Proposal) -> Tensor:
        """The function's value."""
        return self.function(proposal)


def cautious(proposal: Proposal) -> Tensor:
    """1 where the proposal descends the new data's own gradient, else 0.

    Source: Liang et al. 2024, Cautious Optimizers, without its rescaling, which would amplify.    c = [g * delta <= 0]
    """
    if proposal.gradient is None:
        return torch.ones_like(proposal.theta, dtype=torch.float32)
    return algorithm.collaborates(proposal.gradient, proposal.delta)


def largest_momenta(proposal: Proposal, share: float) -> Tensor:
    """1 for the `share` of the tensor's coordinates with the largest first moment, else 0; ties are all kept.

    Source: Chen et al. 2024, MoFO, Algorithm 1.    c = [|m| >= the k-th largest |m|],  k = ceil(share * size)
    """
    if proposal.gradient is None:
        return torch.ones_like(proposal.theta, dtype=torch.float32)
    if proposal.momentum is None:
        raise TypeError("this optimizer keeps its first moment in a form that cannot be read; use AdamW, Adam or SGD")
    size = proposal.momentum.abs().flatten()
    least = size.kthvalue(size.numel() - max(1, math.ceil(share * size.numel())) + 1).values
    return (size >= least).to(torch.float32).view_as(proposal.theta)


def stored(proposal: Proposal) -> Tensor:
    """The evidence itself, which is coefficients (`cplus.methods.curvature`)."""
    return proposal.sign.float()


class Around(Gate):
    """A control around an inner gate, whose counts and state are the inner one's."""

    def __init__(self, inner: Gate) -> None:
        self.inner, self.uses = inner, inner.uses

    def tally(self) -> tuple[int, int]:
        """The inner gate's."""
        return self.inner.tally()

    @property
    def nbytes(self) -> int:
        """The inner gate's."""
        return self.inner.nbytes

    def state_dict(self) -> dict[str, Any]:
        """The inner gate's."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any], params: Sequence[Tensor]) -> None:
        """The inner gate's."""
        self.inner.load_state_dict(state, params)


class NormMatched(Around):
    """Control: the proposal's direction, scaled to the norm that the inner gate would have applied.

    Paper: App. E.6, norm-matched SFT.    c = ||c_inner * delta|| / ||delta||, one number for all tensors
    """

    def coefficients(self, proposals: Sequence[Proposal]) -> Iterator[Tensor]:
        """One constant tensor per proposal, computed on the device: the host does not wait for the norms."""
        total = kept = torch.zeros((), dtype=torch.float64, device=proposals[0].theta.device)
        for proposal, c in zip(proposals, self.inner.coefficients(proposals), strict=True):
            delta = proposal.delta.double()
            total = total + delta.square().sum()
            kept = kept + (delta * c).square().sum()
        # The square root of a ratio <= 1 rounds to at most 1, so the coefficient stays in [0, 1].
        ratio = torch.where(total > 0, (kept / total).sqrt(), 1.0).float()
        for proposal in proposals:
            yield ratio.expand(proposal.theta.shape)


class Shuffled(Around):
    """Control: the inner gate's coefficients, permuted within each tensor at every step.

    Paper: App. E.6, randomized mask. Each tensor keeps its multiset of coefficients; only their placement changes. The
    permutation is drawn on the tensor's device: on the host it would take seconds for a large model.
    """

    def __init__(self, inner: Gate, *, seed: int) -> None:
        super().__init__(inner)
        self.seed = seed
        self.random: dict[str, torch.Generator] = {}
        self._saved: dict[str, Tensor] = {}

    def coefficients(self, proposals: Sequence[Proposal]) -> Iterator[Tensor]:
        """The inner gate's coefficients in another order."""
        for c in self.inner.coefficients(proposals):
            name = str(c.device)
            if name not in self.random:
                self.random[name] = torch.Generator(c.device).manual_seed(self.seed)
                if name in self._saved:
                    self.random[name].set_state(self._saved[name])
            order = torch.randperm(c.numel(), generator=self.random[name], device=c.device)
            yield c.flatten()[order].view_as(c)

    def state_dict(self) -> dict[str, Any]:
        """The states of the inner gate and of the generators."""
        states = {name: random.get_state() for name, random in self.random.items()}
        return {"inner": self.inner.state_dict(), "random": {**self._saved, **states}}

    def load_state_dict(self, state: dict[str, Any], params: Sequence[Tensor]) -> None:
        """Restore the inner gate and the generators, whose states torch takes from the host."""
        self.inner.load_state_dict(state["inner"], params)
        self.random, self._saved = {}, {name: saved.cpu() for name, saved in state["random"].items()}
