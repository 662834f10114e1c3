"""`protect`: the gate on any torch optimizer, by step hooks. The optimizer stays what it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cplus import algorithm, kernels
from cplus.data.encoded import Encoded
from cplus.evidence import Evidence, MeanGradient, Reference, Source, memory_of, named
from cplus.gates import Collaborative, Gate, Proposal
from cplus.kernels import Signs
from cplus.optim import AdamW, Armed
from cplus.ranks import Layout, layout, local
from cplus.support import bare, check_engine, check_supported, trainable, unwrapped
from cplus.watch import ZERO_EVIDENCE

Projection = Callable[[Sequence[Tensor], Sequence[Sequence[Tensor]]], None]
Observer = Callable[[int, Proposal, Tensor], None]
"""Is shown each tensor's place among the parameters, its proposal and its coefficient: to read, not to keep."""


def protect(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    anchors: Sequence[Encoded] = (),
    probes: Sequence[Encoded] = (),
    anchor_weight: float = 0.5,
    beta: float = 0.9,
    ema: kernels.EmaType = "float32",
    refresh_every: int | None = None,
    allow_16bit: bool = False,
) -> Guard:
    """CPLUS on this optimizer: call `guard.refresh()` at each epoch's start, then train as before.

    Only one of anchors and probes may be empty; the other then has all the weight. `refresh_every=n` refreshes
    by itself before the first and every n-th step.
    """
    if not 0.0 <= anchor_weight <= 1.0:
        raise ValueError(f"anchor_weight must lie in [0, 1], got {anchor_weight}")
    if not anchors and not probes:
        raise ValueError("protect needs evidence of past behaviour: give anchors, probes or both; got neither")
    weight = anchor_weight if anchors and probes else float(bool(anchors))
    parts = (("anchors", weight, anchors), ("probes", 1.0 - weight, probes))
    sources = tuple(Source(name=name, weight=w, rows=rows) for name, w, rows in parts if rows)
    model = bare(model)
    return Guard(
        optimizer,
        model,
        evidence=MeanGradient(model=model, sources=sources),
        gate=Collaborative(beta=beta, ema=ema),
        refresh_every=refresh_every,
        allow_16bit=allow_16bit,
    )


class Guard:
    """Evidence, projection and gate around one optimizer's step; owns all of its state."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        evidence: Evidence,
        gate: Gate | None = None,
        projection: Projection | None = None,
        refresh_every: int | None = None,
        allow_16bit: bool = False,
    ) -> None:
        self.optimizer = unwrapped(optimizer)
        self.model, self.evidence, self.gate, self.projection = bare(model), evidence, gate, projection
        if refresh_every is not None and refresh_every < 1:
            raise ValueError(f"refresh_every must be at least 1, got {refresh_every}")
        self.refresh_every, self.allow_16bit = refresh_every, allow_16bit
        self.refreshes = 0
        self.steps = 0
        self.observers: list[Observer] = []
        self._kept: list[list[Tensor | Signs]] = []
        self.theta: list[Tensor] = []
        self.params: list[nn.Parameter] = []
        self.names: dict[int, str] = {}
        self.where = Layout()
        self._bind()
        self.hooks = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]

    def refresh(self) -> Reference:
        """Compute the evidence at the current parameters and use it until the next refresh."""
        self._bind()
        reference = self.evidence(self.params, self.refreshes)
        if reference.norm == 0.0:
            warnings.warn(ZERO_EVIDENCE, stacklevel=2)
        self.vectors = reference.vectors
        self.refreshes += 1
        return reference

    @property
    def vectors(self) -> list[list[Tensor]]:
        """The evidence in use: gradients, or their signs where the gate looks at nothing else."""
        return [[g.unpacked() if isinstance(g, Signs) else g for g in vector] for vector in self._kept]

    @vectors.setter
    def vectors(self, vectors: Sequence[Sequence[Tensor]]) -> None:
        packs = self.gate is not None and self.gate.signs_only and self.projection is None
        self._kept = [[Signs.of(g) if packs else g for g in vector] for vector in vectors]

    def evidence_at(self, position: int) -> Tensor:
        """The evidence about one parameter, or its signs where no more is kept."""
        if not self._kept:
            raise RuntimeError("no evidence yet: call guard.refresh() first")
        g = self._kept[0][position]
        return g.unpacked() if isinstance(g, Signs) else g

    @property
    def nbytes(self) -> int:
        """The memory held from step to step: evidence and gate."""
        memory = memory_of(self.evidence)
        evidence = sum(g.nbytes for vector in self._kept for g in vector) + (memory.nbytes if memory else 0)
        return evidence + (0 if self.gate is None else self.gate.nbytes)

    @property
    def step_nbytes(self) -> int:
        """The memory held during a step on top: an opaque optimizer needs a copy of the parameters."""
        return 0 if self.gate is None or self.one_pass else sum(local(p).nbytes for p in self.params)

    def detach(self) -> None:
        """Take the hooks off: the optimizer is plain again."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        self.theta = []

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def state_dict(self) -> dict[str, Any]:
        """Everything a continued run needs besides the model's and the optimizer's own state."""
        return {
            "ranks": self.where.world if self.where.sharded else 1,
            "gate": None if self.gate is None else self.gate.state_dict(),
            "vectors": [
                [g if isinstance(k, Signs) else g.clone() for g, k in zip(vector, kept, strict=True)]
                for vector, kept in zip(self.vectors, self._kept, strict=True)
            ],
            "memory": None if (memory := memory_of(self.evidence)) is None else memory.state_dict(),
            "refreshes": self.refreshes,
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a kept state; it must belong to parameters of the same shapes, spread over as many processes."""
        self._bind()
        ranks = self.where.world if self.where.sharded else 1
        if state["ranks"] != ranks:
            raise ValueError(
                f"the kept guard state is one of {state['ranks']} shards and this run has {ranks}; keep and take up "
                "states across world sizes with cplus.integrations.distributed.save and load"
            )
        shapes = [local(p).shape for p in self.params]
        for vector in state["vectors"]:
            if [g.shape for g in vector] != shapes:
                raise ValueError("the kept guard state belongs to other parameters: their shapes differ")
        if self.gate is not None:
            self.gate.load_state_dict(state["gate"])
        self.vectors = [[g.clone() for g in vector] for vector in state["vectors"]]
        if (memory := memory_of(self.evidence)) is not None:
            memory.load_state_dict(state["memory"])
        self.refreshes, self.steps = int(state["refreshes"]), int(state["steps"])

    def _bind(self) -> None:
        """Take the optimizer's parameters; sharding may exchange them until the first refresh, nothing after it."""
        params = trainable(self.optimizer)
        if len(params) == len(self.params) and all(p is q for p, q in zip(params, self.params, strict=True)):
            return
        if self._kept:
            raise ValueError("the optimizer's parameters changed after protect(); detach and protect it again")
        self.names, self.params = named(self.model), params
        for p in params:
            check_supported(p, self.names.get(id(p), "a parameter outside the model"), allow_16bit=self.allow_16bit)
        self.where = layout(params, self.names)
        whole = self.projection is not None or memory_of(self.evidence) is not None
        check_engine(self.model, self.where, self.gate, whole=whole)

    @torch.no_grad()
    def _before(self, *_: object) -> None:
        self._bind()
        self._check_gradients()
        idle = self._idle
        if not idle and self.refresh_every is not None and self.steps % self.refresh_every == 0:
            with torch.enable_grad():
                self.refresh()
        if not idle and not self._kept:
            raise RuntimeError("no evidence yet: call guard.refresh() before the first step, or pass refresh_every=n")
        if self.projection is not None and self._kept:
            self._project(self.projection)
        if self.one_pass:
            if self._kept and not idle:
                self._arm()
        elif self.gate is not None:
            self.theta = kernels.copies([local(p) for p in self.params])

    @torch.no_grad()
    def _after(self, *_: object) -> None:
        """Line 9 of the algorithm has happened inside the optimizer; apply lines 10-13 to what it proposed.

        Paper: Algorithm 1, line 9.    delta = proposed - theta, momentum and weight decay included
        """
        theta, self.theta = self.theta, []
        if self.gate is None or self.one_pass:
            self.steps += bool(self._kept) and not self._idle
            return
        proposed = [local(p) for p in self.params]
        if not self._moved(theta, proposed):
            return  # a step that a gradient scaler skipped inside a fused optimizer is not a step
        if not self._kept:
            torch._foreach_copy_(proposed, theta)
            raise RuntimeError("the optimizer moved parameters at learning rate 0; call guard.refresh() before it")
        proposals = [
            Proposal(theta=t, proposed=p, g_hat=g) for t, p, g in zip(theta, proposed, self._kept[0], strict=True)
        ]
        if self.compiled:
            self._apply_compiled(proposals)
        else:
            for i, (proposal, c) in enumerate(zip(proposals, self.gate.coefficients(proposals), strict=True)):
                self._show(i, proposal, c)
                proposal.proposed.copy_(algorithm.apply(proposal.theta, proposal.proposed, c))
        self.steps += 1

    @property
    def _idle(self) -> bool:
        """Whether the rate is 0: a warm-up's first step, or one that only makes the optimizer create its state."""
        return all(group.get("lr") == 0 for group in self.optimizer.param_groups)

    @cached_property
    def compiled(self) -> bool:
        """Whether the gate runs as one compiled pass; small models go the plain way, where compiling costs more."""
        if not isinstance(self.gate, Collaborative) or self.projection is not None or self.where.sharded:
            return False
        if sum(p.numel() for p in self.params) < kernels.WORTH_COMPILING:
            return False
        return all(map(kernels.fits, self.params)) and kernels.can_compile(self.params[0].device.type)

    @property
    def one_pass(self) -> bool:
        """Whether the optimizer itself gates what it proposes, with no copy of the parameters."""
        return isinstance(self.optimizer, AdamW) and self.compiled

    def _arm(self) -> None:
        """Hand the step's evidence and average to the one-pass optimizer."""
        gate, optimizer = self.gate, self.optimizer
        assert isinstance(gate, Collaborative)
        assert isinstance(optimizer, AdamW)
        gate.allocate([p.detach() for p in self.params])
        gate.step += 1
        ids = [id(p) for p in self.params]
        signs = {i: g for i, g in zip(ids, self._kept[0], strict=True) if isinstance(g, Signs)}
        ema = dict(zip(ids, gate.ema, strict=True)) if gate.ema else {}
        optimizer.armed = Armed(
            signs=signs,
            ema=ema,
            numbers=kernels.gate_numbers(gate.beta, gate.step),
            watch=self._show_armed if self.observers else None,
        )

    def _apply_compiled(self, proposals: Sequence[Proposal]) -> None:
        """Lines 10-13 in one pass a tensor, in place."""
        gate = self.gate
        assert isinstance(gate, Collaborative)
        gate.allocate([proposal.theta for proposal in proposals])
        gate.step += 1
        numbers = kernels.gate_numbers(gate.beta, gate.step)
        for i, proposal in enumerate(proposals):
            assert isinstance(proposal.g_hat, Signs)
            seen = replace(proposal, proposed=proposal.proposed.clone()) if self.observers else proposal
            ema = gate.ema[i] if gate.ema else None
            kernels.gate(proposal.theta, proposal.proposed, proposal.g_hat, ema, numbers)
            self._show_kept(i, seen)

    def _show(self, position: int, proposal: Proposal, c: Tensor) -> None:
        for observer in self.observers:
            observer(position, proposal, c)

    def _show_kept(self, position: int, proposal: Proposal) -> None:
        """Show what a compiled pass has applied: its coefficient is read back from the average it kept."""
        gate = self.gate
        assert isinstance(gate, Collaborative)
        if self.observers:
            average = (
                kernels.read(gate.ema[position]) if gate.ema else algorithm.collaborates(proposal.sign, proposal.delta)
            )
            self._show(position, proposal, algorithm.coefficient(average, gate.beta, gate.step))

    def _show_armed(self, p: nn.Parameter, theta: Tensor, proposed: Tensor) -> None:
        position = next(i for i, q in enumerate(self.params) if q is p)
        self._show_kept(position, Proposal(theta=theta, proposed=proposed, g_hat=self._kept[0][position]))

    def _moved(self, theta: Sequence[Tensor], proposed: Sequence[Tensor]) -> bool:
        moved = not all(torch.equal(t, p) for t, p in zip(theta, proposed, strict=True))
        if not self.where.sharded:
            return moved
        return any(self.where.sums([moved], proposed[0].device))  # all processes count steps alike

    def _project(self, projection: Projection) -> None:
        used = [i for i, p in enumerate(self.params) if p.grad is not None]
        gradients = [g for i in used if (g := self.params[i].grad) is not None]
        projection(gradients, [[vector[i] for i in used] for vector in self.vectors])

    def _glance(self, gradients: list[tuple[nn.Parameter, Tensor]]) -> list[tuple[nn.Parameter, Tensor]]:
        """All small tensors and one large one, in turn.

        The one-pass kernel leaves a coordinate without a finite gradient alone, so looking can be cheap: a NaN in the
        forward pass reaches the small tensors, norms and biases, at once; one that does not is found in its turn.
        """
        small = [each for each in gradients if each[1].numel() < kernels.SHARED]
        large = [each for each in gradients if each[1].numel() >= kernels.SHARED]
        return small + large[self.steps % len(large) :][:1] if large else small

    def _check_gradients(self) -> None:
        if getattr(self.optimizer, "found_inf", None) is not None:
            return  # a gradient scaler watches over these and skips the step itself
        gradients = [(p, local(p.grad)) for p in self.params if p.grad is not None]
        if self.one_pass:
            gradients = self._glance(gradients)
        if not gradients:
            return
        # A sum reads memory once at full speed; one that overflows is looked into below and found harmless.
        total = torch.stack([g.sum().float() for _, g in gradients]).sum()
        if self.where.sharded:
            self.where.sum(total)  # one process's NaN stops them all, instead of leaving the others waiting
        if bool(torch.isfinite(total)):
            return
        bad = [p for p, g in gradients if not bool(torch.isfinite(g).all())]
        if self.where.sums([len(bad)], total.device)[0] if self.where.sharded else bad:
            name = self.names.get(id(bad[0]), "a parameter") if bad else "a parameter held by another process"
            raise FloatingPointError(
                f"the gradient of {name} is not finite at step {self.steps + 1}; this step changed nothing. Lower the "
                "learning rate, clip the gradient or check the batch"
            )
