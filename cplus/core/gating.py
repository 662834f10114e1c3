"""The gate's part of an optimizer's step: on which tensors, with which evidence, and in which of three ways.

The plain way computes coefficients and applies them; a compiled kernel does both in one pass after any optimizer's
step; inside our AdamW that pass computes the proposal, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cplus.core import algorithm, kernels
from cplus.core.engine import Engine, local
from cplus.core.gates import Gate, Proposal
from cplus.core.kernels import Layout, Signs
from cplus.core.optim import AdamW, Armed, first_moment

Observer: TypeAlias = Callable[[int, Proposal, Tensor], None]
"""Called with each tensor's index among the parameters, its proposal and its coefficients, to read but not to keep."""


class Gating:
    """A gate on an optimizer's parameters, and the evidence in use."""

    def __init__(
        self,
        optimizer: Optimizer,
        engine: Engine,
        params: list[nn.Parameter],
        gate: Gate | None,
        *,
        projected: bool,
        still: Mapping[int, Tensor],
        observers: Sequence[Observer],
    ) -> None:
        self.optimizer, self.engine, self.params, self.gate = optimizer, engine, params, gate
        self.projected, self.still, self.observers = projected, still, observers
        known = gate is not None and (gate.average is not None or gate.uses == "coefficients")
        self.compilable = known and not projected and not engine.one_by_one
        groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        kinds = [groups[id(p)] for p in params] if self.compilable else []
        self.layout = Layout([local(p) for p in params], kinds)
        if gate is not None and gate.average is not None:
            gate.average.layout = self.layout
        self.kept: list[list[Tensor | Signs]] = []  # the evidence, by unit of the layout
        self.proposing = False  # whether a parameter has a gradient in this step
        self._units: list[int] = []  # what this step changes
        self._theta: list[Tensor] = []  # their values before the step
        self._values: dict[int, Tensor] = {}  # those of the tensors of which some rows do not train

    def vectors(self) -> list[list[Tensor]]:
        """The evidence by parameter: gradients, or their signs if the gate reads nothing else."""
        wholes = [[g.unpacked() if isinstance(g, Signs) else g for g in vector] for vector in self.kept]
        return [self.layout.separate(vector) for vector in wholes]

    def keep(self, vectors: Sequence[Sequence[Tensor]]) -> None:
        """Use this evidence from now on; of what is read by its signs alone, only these are stored."""
        packs = self.gate is not None and self.gate.uses == "signs" and not self.projected
        self.kept = []
        for vector in vectors:
            # Where a tensor does not train nothing is proposed; with the sign 0 it counts as admitted.
            own = [g.masked_fill(self.still[i], 0) if packs and i in self.still else g for i, g in enumerate(vector)]
            self.kept.append([Signs.of(g) if packs else g for g in self.layout.joined(own)])

    def evidence_at(self, position: int) -> Tensor:
        """The evidence for one parameter, or its signs if only those are stored."""
        g = self.layout.separate(self.kept[0])[position]
        return g.unpacked() if isinstance(g, Signs) else g

    @cached_property
    def compiled(self) -> bool:
        """Whether the gate runs as one compiled pass."""
        return self.compiles(sum(p.numel() for p in self.params))

    def compiles(self, parameters: int) -> bool:
        """Whether the gate would be compiled with this many parameters; for small models compiling costs too much."""
        if not self.compilable or parameters < kernels.WORTH_COMPILING:
            return False
        device, unfit = self.params[0].device, sum(not kernels.fits(local(p)) for p in self.params)
        return self.engine.over_shards(unfit, device) == 0 and kernels.can_compile(device.type)  # all decide alike

    @property
    def one_pass(self) -> bool:
        """Whether the optimizer gates its own proposal, without a copy of the parameters."""
        return isinstance(self.optimizer, AdamW) and self.compiled

    @property
    def copies(self) -> bool:
        """Whether a step copies all parameters, not only those of which some rows stay."""
        return self.gate is not None and not self.one_pass

    @property
    def idle(self) -> bool:
        """Whether the learning rate is 0."""
        return self.engine.idle(self.optimizer)

    def begin(self) -> None:
        """Copy what the step will change."""
        now = self.engine.stepping(self.params)
        self._units = [unit for unit, places in enumerate(self.layout.units) if places[0] in now]
        self._theta = kernels.copies([self._joined(unit) for unit in self._units]) if self.copies else []
        self._values = {i: local(self.params[i]).clone() for i in now if i in self.still}
        self.proposing = False

    def arm(self, step: int) -> None:
        """Pass the step's evidence and average to our AdamW."""
        if isinstance(self.optimizer, AdamW) and self.one_pass and self.proposing and not self.idle:
            watch = self._watch if self.observers else None
            self.optimizer.armed = Armed(self.params, self.layout, *self._inputs(step), self.engine.moving, watch)

    def stepped(self) -> bool:
        """Whether this was a step: there were gradients at a learning rate above 0, or parameters moved anyway.

        A fused optimizer fires its hooks even if the gradient scaler makes it skip; that is not a step.
        """
        if isinstance(self.optimizer, AdamW) and self.optimizer.armed is not None:
            self.optimizer.armed = None
            raise RuntimeError(
                "the step did not run the gated kernel of cplus.optim.AdamW, so the parameters moved without the "
                "gate; load the last checkpoint and call optimizer.step() as it is, neither compiled nor overridden"
            )
        found_inf = getattr(self.optimizer, "found_inf", None) if self.copies else None
        if found_inf is not None and bool(found_inf):
            return False
        if not self.copies or (self.proposing and not self.idle):
            return self.proposing and not self.idle
        moved = not all(torch.equal(t, self._joined(k)) for k, t in zip(self._units, self._theta, strict=True))
        return any(self.engine.sums([moved], self.params[0].device))  # all processes count the same steps

    def apply(self, step: int) -> bool:
        """Lines 10-13 on the proposals that the parameters hold; our AdamW has gated its own.

        Returns whether this was the last part of the step: ZeRO steps its partitions one after another.
        """
        if self.gate is not None and self.copies:
            proposals = [self._proposal(k, theta) for k, theta in zip(self._units, self._theta, strict=True)]
            if self.compiled:
                self._run(proposals, step)
            else:
                for p, c in zip(proposals, self.gate.coefficients(proposals), strict=True):
                    self._show(p, self.layout.split(p.position, c))
                    self._write(p.position, algorithm.apply(p.theta, p.proposed, c))
        return self._units[-1] == len(self.layout.units) - 1

    def put_back(self) -> None:
        """Undo what was done to rows that do not train."""
        for i, before in self._values.items():
            p = local(self.params[i])
            p.copy_(torch.where(self.still[i], before, p))

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the parameters to their values before a step that failed."""
        for unit, theta in zip(self._units, self._theta, strict=False):
            self._write(unit, theta)
        self.put_back()
        self.end()
        if isinstance(self.optimizer, AdamW):
            self.optimizer.armed = None

    def end(self) -> None:
        """Free the copies."""
        self._theta, self._values = [], {}

    def _joined(self, unit: int) -> Tensor:
        """The current values of a unit's parameters; those of a parameter alone are its own memory."""
        places = self.layout.units[unit]
        return self.layout.join(unit, {i: local(self.params[i]) for i in places})

    def _write(self, unit: int, values: Tensor) -> None:
        torch._foreach_copy_([local(self.params[i]) for i in self.layout.units[unit]], self.layout.split(unit, values))

    def _proposal(self, unit: int, theta: Tensor) -> Proposal:
        g_hat, proposed = self.kept[0][unit] if self.kept else None, self._joined(unit)
        if self.engine.moving is not None:  # a gradient that is not finite proposes nothing
            proposed.copy_(torch.where(self.engine.moving, proposed, theta))
        gradient = momentum = None
        if not self.compilable:  # such a gate may read more; its tensors are alone
            p = self.params[unit]
            gradient, momentum = p.grad, first_moment(self.optimizer, p)
        return Proposal(
            theta=theta,
            proposed=proposed,
            g_hat=g_hat,
            gradient=None if gradient is None else local(gradient),
            momentum=None if momentum is None else local(momentum),
            position=unit,
        )

    def _run(self, proposals: Sequence[Proposal], step: int) -> None:
        """The compiled pass after an optimizer's step."""
        signs, averages, numbers = self._inputs(step)
        [row] = kernels.on_device([numbers], self.params[0].device)
        for p in proposals:
            unit, shown = p.position, replace(p, proposed=p.proposed.clone()) if self.observers else p
            kernels.gate(p.theta, p.proposed, signs[unit] if signs else None, averages[unit] if averages else None, row)
            if len(self.layout.units[unit]) > 1:
                self._write(unit, p.proposed)
            self._show(shown)

    def _inputs(self, step: int) -> tuple[Sequence[Signs], Sequence[Tensor], tuple[float, ...]]:
        """Signs, averages and scalars of a step; stored coefficients are an average that does not move."""
        average = None if self.gate is None else self.gate.average
        if average is None:
            return [], [c for c in self.kept[0] if isinstance(c, Tensor)], kernels.STILL
        if average.beta and not average.units:
            average.allocate([self._joined(unit) for unit in range(len(self.layout.units))])
        average.step = step
        signs = [g for g in self.kept[0] if isinstance(g, Signs)]
        return signs, average.units, kernels.gate_numbers(average.beta, step)

    def _show(self, proposal: Proposal, coefficients: Sequence[Tensor] = ()) -> None:
        """Call the observers with each parameter of a unit; what a compiled pass has applied is computed again."""
        if not self.observers or self.gate is None:
            return
        wholes = (proposal.theta, proposal.proposed, proposal.g_hat)
        parts = [self.layout.split(proposal.position, own) for own in wholes]
        for number, (i, (theta, proposed, g_hat)) in enumerate(
            zip(self.layout.units[proposal.position], zip(*parts, strict=True), strict=True)
        ):
            own = replace(proposal, theta=theta, proposed=proposed, g_hat=g_hat, position=i)
            c = coefficients[number] if coefficients else self.gate.applied(own)
            for observer in self.observers:
                observer(i, own, c)

    def _watch(self, position: int, theta: Tensor, proposed: Tensor) -> None:
        """Show what our AdamW has gated; where a tensor does not train, nothing was proposed."""
        if position in self.still:
            proposed = torch.where(self.still[position], theta, proposed)
        g_hat = self.layout.separate(self.kept[0])[position]
        own = Proposal(theta=theta, proposed=proposed, g_hat=g_hat, position=position)
        assert self.gate is not None
        for observer in self.observers:
            observer(position, own, self.gate.applied(own))
