"""Gates: from an optimizer's proposal to coefficients in [0, 1], and nothing else.

A gate never writes a parameter. `cplus.attach` applies what it returns, in one place, so a probe can
attenuate an update and can never introduce, amplify or reverse one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cplus import algorithm, kernels
from cplus.kernels import Signs


@dataclass(frozen=True, slots=True)
class Proposal:
    """One tensor's step: where it stands, where the optimizer wants it, and the evidence about it."""

    theta: Tensor
    proposed: Tensor
    g_hat: Tensor | Signs

    @property
    def sign(self) -> Tensor:
        """The evidence's signs, unpacked at each call so that nothing is kept."""
        return self.g_hat.unpacked() if isinstance(self.g_hat, Signs) else self.g_hat

    @property
    def delta(self) -> Tensor:
        """What the optimizer wants to add, computed anew at each call so that nothing is kept."""
        return self.proposed - self.theta


class Gate(Protocol):
    """Owned state and one coefficient tensor per proposal, yielded in order.

    `signs_only` says that the gate looks at the sign of the evidence alone, so that two bits a coordinate are kept.
    """

    signs_only: bool

    def coefficients(self, proposals: Sequence[Proposal]) -> Iterator[Tensor]:
        """One step's coefficients; every proposal of the step is given, so a gate may look twice."""
        ...

    @property
    def nbytes(self) -> int:
        """The memory held from step to step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to go on bitwise."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a kept state."""
        ...


class Collaborative:
    """The paper's gate: the sign mask, smoothed over steps. beta = 0 with anchors alone is CPL."""

    signs_only = True

    def __init__(self, *, beta: float, ema: kernels.EmaType = "float32") -> None:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"beta must lie in [0, 1), got {beta}")
        if ema not in ("float32", "bfloat16", "uint8"):
            raise ValueError(f"the moving average is kept in float32, bfloat16 or uint8, got {ema!r}")
        self.beta, self.kind = beta, ema
        self.step = 0
        self.ema: list[Tensor] = []
        self._admitted: Tensor | None = None
        self._offered = 0

    def coefficients(self, proposals: Sequence[Proposal]) -> Iterator[Tensor]:
        """Lines 10-12 of Algorithm 1, one tensor at a time."""
        self.step += 1
        if self.beta == 0.0:  # ema = mask and the correction is 1: nothing needs to be remembered
            for proposal in proposals:
                yield self._counted(algorithm.collaborates(proposal.sign, proposal.delta))
            return
        self.allocate([proposal.theta for proposal in proposals])
        for i, proposal in enumerate(proposals):
            mask = self._counted(algorithm.collaborates(proposal.sign, proposal.delta))
            average = algorithm.smooth(kernels.read(self.ema[i]), mask, self.beta)
            self.ema[i] = kernels.stored(average, self.ema[i])
            yield algorithm.coefficient(kernels.read(self.ema[i]), self.beta, self.step)

    def allocate(self, params: Sequence[Tensor]) -> None:
        """Make the moving average before the first step; with beta = 0 there is none."""
        if not self.ema and self.beta:
            self.ema = [kernels.zeros(p, self.kind) for p in params]

    def tally(self) -> tuple[int, int]:
        """Coordinates with mask 1 and coordinates in all, over the steps since the last call."""
        counted = (0 if self._admitted is None else int(self._admitted), self._offered)
        self._admitted, self._offered = None, 0
        return counted

    def _counted(self, mask: Tensor) -> Tensor:
        # The sum stays on the device: reading it at every step would make the host wait.
        count = mask.count_nonzero()
        self._admitted = count if self._admitted is None else self._admitted + count.to(self._admitted.device)
        self._offered += mask.numel()
        return mask

    @property
    def nbytes(self) -> int:
        """The moving average."""
        return sum(e.nbytes for e in self.ema)

    def state_dict(self) -> dict[str, Any]:
        """The step count and the moving average."""
        return {"step": self.step, "ema": [e.clone() for e in self.ema]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a kept step count and moving average."""
        if self.ema and [e.shape for e in self.ema] != [e.shape for e in state["ema"]]:
            raise ValueError("the kept gate state belongs to parameters of other shapes")
        self.step = int(state["step"])
        self.ema = [e.clone() for e in state["ema"]]


class Elementwise:
    """A gate without memory, by a pure function: an update and the evidence about it give the coefficients."""

    signs_only = False

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def coefficients(self, proposals: Sequence[Proposal]) -> Iterator[Tensor]:
        """What the function says; outside [0, 1] it would no longer attenuate, and is refused."""
        for proposal in proposals:
            c = self.function(proposal.delta, proposal.sign)
            if c.shape != proposal.theta.shape or not bool(((c >= 0) & (c <= 1)).all()):
                raise ValueError(
                    f"a gate's coefficients must lie in [0, 1], one for each of {tuple(proposal.theta.shape)} "
                    f"coordinates, got {tuple(c.shape)} from {float(c.min()):g} to {float(c.max()):g}"
                )
            yield c

    @property
    def nbytes(self) -> int:
        """Nothing is kept from step to step."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


class NormMatched:
    """Control: the whole proposal's direction at the norm the inner gate would have applied.

    Paper: App. E.6, norm-matched SFT.    c = ||c_inner * delta|| / ||delta||, one number for all tensors
    """

    signs_only = True

    def __init__(self, inner: Gate) -> None:
        self.inner = inner

    def coefficients(self, proposals: Sequence[Proposal]) -> Iterator[Tensor]:
        """One constant tensor per proposal."""
        whole = kept = 0.0
        for proposal, c in zip(proposals, self.inner.coefficients(proposals), strict=True):
            delta = proposal.delta.double()
            whole += float(delta.square().sum())
            kept += float((delta * c).square().sum())
        # The square root of a ratio <= 1 rounds to at most 1, so the coefficient stays in [0, 1].
        ratio = (kept / whole) ** 0.5 if whole else 1.0
        for proposal in proposals:
            yield torch.full_like(proposal.theta, ratio, dtype=torch.float32)

    @property
    def nbytes(self) -> int:
        """The inner gate's."""
        return self.inner.nbytes

    def state_dict(self) -> dict[str, Any]:
        """The inner gate's."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inner gate's."""
        self.inner.load_state_dict(state)


class Shuffled:
    """Control: the inner gate's coefficients, permuted inside each tensor at every step.

    Paper: App. E.6, randomized mask. The multiset of each tensor is kept; its placement is broken.
    """

    signs_only = True

    def __init__(self, inner: Gate, *, seed: int) -> None:
        self.inner = inner
        self.random = torch.Generator().manual_seed(seed)

    def coefficients(self, proposals: Sequence[Proposal]) -> Iterator[Tensor]:
        """The inner gate's coefficients in another order."""
        for c in self.inner.coefficients(proposals):
            order = torch.randperm(c.numel(), generator=self.random).to(c.device)
            yield c.flatten()[order].view_as(c)

    @property
    def nbytes(self) -> int:
        """The inner gate's."""
        return self.inner.nbytes

    def state_dict(self) -> dict[str, Any]:
        """The inner gate's and the generator's."""
        return {"inner": self.inner.state_dict(), "random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inner gate's and the generator's."""
        self.inner.load_state_dict(state["inner"])
        self.random.set_state(state["random"])
