"""`protect`: the gate on any torch optimizer, through step hooks; the optimizer object itself is unchanged."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, SupportsIndex, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cplus.base.environment import check_versions
from cplus.core import algorithm, kernels
from cplus.core.engine import (
    bare,
    check_predicts_tokens,
    check_supported,
    engine_of,
    in_model,
    local,
    trainable,
    unwrapped,
)
from cplus.core.evidence import (
    Entry,
    Evidence,
    LossGradient,
    MeanGradient,
    Reference,
    Source,
    memory_of,
    sources,
)
from cplus.core.gates import Collaborative, Gate, Proposal
from cplus.core.kernels import Signs
from cplus.core.optim import AdamW, apply_compiled, arm, first_moments, nested
from cplus.core.rows import ZERO_EVIDENCE, Encoded

OnlyRows: TypeAlias = Mapping[str, Sequence[int]]
"""The rows that train, by the name of their parameter; all rows of the other parameters do."""
Projection: TypeAlias = Callable[[Sequence[Tensor], Sequence[Sequence[Tensor]]], None]
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Observer: TypeAlias = Callable[[int, Proposal, Tensor], None]
"""Called with each tensor's index among the parameters, its proposal and its coefficients, to read but not to keep."""


def protect(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    anchors: Sequence[Encoded] = (),
    probes: Sequence[Encoded] = (),
    anchor_weight: float = 0.5,
    evidence: Sequence[Entry] = (),
    beta: float = 0.9,
    ema: kernels.EmaType = "float32",
    refresh_every: int | None = None,
    only_rows: OnlyRows | None = None,
    allow_16bit: bool = False,
) -> Guard:
    """CPLUS on this optimizer: call `guard.refresh()` at the start of each epoch, then train as before.

    The evidence is rows of tokens, `anchors` and `probes`, or any loss: `evidence` lists a weight, the batches and a
    function `loss(model, batch)` for each source. Either anchors or probes may be empty; the other then has all the
    weight. `refresh_every=n` refreshes automatically before the first and every n-th step.
    `only_rows={"model.embed_tokens.weight": [50000, 50001]}` trains these rows of a parameter; its others stay.
    """
    check_versions()
    model = bare(model)
    chosen = past_behaviour(model, anchors, probes, anchor_weight, evidence)
    guard = Guard(
        optimizer,
        model,
        evidence=chosen,
        gate=Collaborative(beta=beta, ema=ema),
        refresh_every=refresh_every,
        only_rows=only_rows,
        allow_16bit=allow_16bit,
    )
    held = {id(in_model(p)) for p in guard.engine.trained(guard.params)}
    outside = [name for name, p in guard.engine.module.named_parameters() if p.requires_grad and id(p) not in held]
    if outside:
        warnings.warn(
            f"{len(outside)} trainable parameters of the model, such as {outside[0]}, are not in this optimizer and "
            "will not be gated by it; if another optimizer trains them, protect that one too",
            stacklevel=2,
        )
    if isinstance(chosen, LossGradient):
        try:
            chosen.rehearse(guard.params)
        except BaseException:
            guard.detach()
            raise
    return guard


def past_behaviour(
    model: nn.Module,
    anchors: Sequence[Encoded],
    probes: Sequence[Encoded],
    anchor_weight: float,
    evidence: Sequence[Entry],
) -> LossGradient | MeanGradient:
    """What `protect` is given, as evidence: losses, or rows of tokens."""
    if not evidence:
        return rows_of_tokens(model, anchors, probes, anchor_weight)
    if anchors or probes:
        raise ValueError(
            "give anchors and probes, or evidence, not both; rows of tokens become evidence by the loss "
            "lambda model, rows: cplus.core.losses.answer_losses(model, rows).mean()"
        )
    return LossGradient(model=model, sources=sources(evidence))


def rows_of_tokens(
    model: nn.Module, anchors: Sequence[Encoded], probes: Sequence[Encoded], anchor_weight: float
) -> MeanGradient:
    """The paper's evidence: the cross-entropy of anchors and probes."""
    if not 0.0 <= anchor_weight <= 1.0:
        raise ValueError(f"anchor_weight must lie in [0, 1], got {anchor_weight}")
    if not anchors and not probes:
        raise ValueError("protect needs evidence of past behaviour: give anchors, probes or both; got neither")
    check_predicts_tokens(model)
    weight = anchor_weight if anchors and probes else float(bool(anchors))
    parts = (("anchors", weight, anchors), ("probes", 1.0 - weight, probes))
    return MeanGradient(
        model=model, sources=tuple(Source(name=name, weight=w, rows=rows) for name, w, rows in parts if rows)
    )


def rows_that_train(only: OnlyRows, module: nn.Module, trained: Sequence[nn.Parameter]) -> dict[str, list[int]]:
    """The rows by the first name of their parameter; tied parameters may be named by either name."""
    known = dict(module.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in module.named_parameters()}
    trains = {id(in_model(p)) for p in trained}
    found: dict[str, list[int]] = {}
    for name, rows in only.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else "; model.named_parameters() lists them"
            raise ValueError(f"only_rows names {name!r}, and the model has no such parameter{hint}")
        p = known[name]
        if id(p) not in trains:
            raise ValueError(
                f"only_rows names {name!r}, which the optimizer does not train; give it to the optimizer and make it "
                "require gradients"
            )
        numbers = row_numbers(name, shape_of(p), rows)
        if found.setdefault(first[id(p)], numbers) != numbers:
            raise ValueError(
                f"only_rows gives {name!r} and {first[id(p)]!r} different rows, but they are one tied parameter"
            )
    return found


def shape_of(p: nn.Parameter) -> torch.Size:
    """A parameter's whole shape; ZeRO 3 leaves the parameter itself empty."""
    shape: torch.Size = getattr(p, "ds_shape", p.shape)
    return shape


def row_numbers(name: str, shape: torch.Size, rows: Sequence[int]) -> list[int]:
    """The row numbers in order, each once."""
    if not shape:
        raise ValueError(f"only_rows names {name!r}, which is a single number and has no rows")
    if not isinstance(rows, Iterable):
        raise TypeError(f"the rows of {name!r} must be a list of whole numbers, got {type(rows).__name__}")
    listed = rows.tolist() if isinstance(rows, Tensor) else list(rows)
    wrong = [row for row in listed if isinstance(row, bool) or not isinstance(row, SupportsIndex)]
    if wrong:
        raise TypeError(f"the rows of {name!r} must be whole numbers counted from 0, got {wrong[0]!r}")
    outside = [row for row in listed if not 0 <= row < shape[0]]
    if outside:
        raise ValueError(
            f"{name!r} has the rows 0 to {shape[0] - 1}, and only_rows names {outside[0]}; after adding tokens, call "
            "model.resize_token_embeddings() before building the optimizer"
        )
    if not listed:
        raise ValueError(f"only_rows gives {name!r} no row to train; set requires_grad=False instead to freeze it")
    return sorted({int(row) for row in listed})


class Guard:
    """Evidence, projection and gate around one optimizer's step; owns all of its state.

    Evidence is required by a projection and by every gate that reads it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        evidence: Evidence | None = None,
        gate: Gate | None = None,
        projection: Projection | None = None,
        refresh_every: int | None = None,
        only_rows: OnlyRows | None = None,
        allow_16bit: bool = False,
    ) -> None:
        self.model, self.evidence, self.gate, self.projection = bare(model), evidence, gate, projection
        self.optimizer = unwrapped(optimizer, self.model)
        self.engine = engine_of(self.model, trainable(self.optimizer))
        hooks = self.optimizer._optimizer_step_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), Guard) for hook in hooks):
            raise ValueError(
                "this optimizer is already protected; call detach() on its guard before another is attached"
            )
        if evidence is None and (projection is not None or gate is None or gate.uses != "nothing"):
            raise ValueError("this gate or projection reads evidence of past behaviour, and none was given")
        self.engine.check_refreshes(refresh_every)
        self.refresh_every, self.allow_16bit, self.only_rows = refresh_every, allow_16bit, dict(only_rows or {})
        self.refreshes = self.steps = 0
        self.observers: list[Observer] = []
        self.params: list[nn.Parameter] = []
        self.names: dict[int, str] = {}
        self.training_rows: dict[str, list[int]] = {}
        self._kept: list[list[Tensor | Signs]] = []  # the evidence in use
        self._theta: list[Tensor] = []  # the stepped parameters' values before the step
        self._still: dict[int, Tensor] = {}  # where a tensor does not train, by its position
        self._values: dict[int, Tensor] = {}  # its values before the step
        self._unlisted: list[nn.Parameter] = []  # parameters that a step must not change
        self._unlisted_versions: list[int] = []
        self._versions: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._proposing = False
        self._bind()
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]

    def _bind(self) -> None:
        """Bind the optimizer's parameters; they may be replaced, as sharding does, only before the first refresh."""
        params = self.engine.params(self.optimizer)
        if len(params) == len(self.params) and all(p is q for p, q in zip(params, self.params, strict=True)):
            if [p.dtype for p in params] != self._dtypes:
                raise ValueError(
                    "the parameters' precision changed after protect(); convert the model before protect()"
                )
            return
        if self._kept:
            raise ValueError("the optimizer's parameters changed after protect(); detach the guard and protect again")
        self.engine = engine_of(self.model, params)
        self.names, self.params, self._dtypes = self.engine.names(), params, [p.dtype for p in params]
        self.names |= {id(p): self.names[id(q)] for p in params if id(q := in_model(p)) in self.names}
        for p in params:
            check_supported(p, self.names.get(id(p), "a parameter outside the model"), allow_16bit=self.allow_16bit)
        whole = self.gate is not None and self.gate.whole
        self.engine.check(params, whole=whole or self.projection is not None or memory_of(self.evidence) is not None)
        trained = self.engine.trained(params)
        self.training_rows = rows_that_train(self.only_rows, self.engine.module, trained)
        known, still = dict(self.engine.module.named_parameters()), {}
        for name, rows in self.training_rows.items():
            still[name] = torch.ones(shape_of(known[name])[0], dtype=torch.bool)
            still[name][rows] = False
        self._still = self.engine.held_still(still, params)
        listed = {id(p) for p in [*params, *trained]}
        held = [*self.model.parameters(), *(p for group in self.optimizer.param_groups for p in group["params"])]
        self._unlisted = list({id(p): p for p in held if id(p) not in listed}.values())

    def refresh(self) -> Reference:
        """Compute the evidence at the current parameters and use it until the next refresh."""
        self._bind()
        if self.evidence is None:
            raise ValueError("this guard's gate reads no evidence, so there is nothing to refresh")
        if self._versions and self._versions != self.engine.versions(self.params):
            warnings.warn(
                "parameters have changed since the last gated step, outside the gate; that is right after loading or "
                "averaging weights, but an optimizer, wrapper or hook that writes them itself is not gated: protect "
                "the optimizer whose step() is called",
                stacklevel=2,
            )
        reference = self.evidence(self.params, self.refreshes)
        if reference.norm == 0.0:
            warnings.warn(ZERO_EVIDENCE, stacklevel=2)
        self.vectors = reference.vectors
        self.refreshes += 1
        self._versions = self.engine.versions(self.params)
        return reference

    @property
    def vectors(self) -> list[list[Tensor]]:
        """The evidence in use: gradients, or their signs if the gate reads nothing else."""
        return [[g.unpacked() if isinstance(g, Signs) else g for g in vector] for vector in self._kept]

    @vectors.setter
    def vectors(self, vectors: Sequence[Sequence[Tensor]]) -> None:
        # Where a tensor does not train nothing is proposed; with the sign 0 it counts as admitted.
        packs = self.gate is not None and self.gate.uses == "signs" and self.projection is None
        self._kept = [
            [
                Signs.of(g.masked_fill(self._still[i], 0) if i in self._still else g) if packs else g
                for i, g in enumerate(v)
            ]
            for v in vectors
        ]

    def evidence_at(self, position: int) -> Tensor:
        """The evidence for one parameter, or its signs if only those are stored."""
        if not self._kept:
            raise RuntimeError("no evidence yet: call guard.refresh() first")
        g = self._kept[0][position]
        return g.unpacked() if isinstance(g, Signs) else g

    @property
    def nbytes(self) -> int:
        """The memory held between steps: evidence and gate."""
        memory = memory_of(self.evidence)
        evidence = sum(g.nbytes for vector in self._kept for g in vector) + (memory.nbytes if memory else 0)
        return evidence + (0 if self.gate is None else self.gate.nbytes)

    @property
    def step_nbytes(self) -> int:
        """The additional memory during a step: any optimizer but our AdamW needs a copy of the parameters."""
        copied = range(len(self.params)) if self._copies else self._still
        return self.engine.at_once([local(self.params[i]).nbytes for i in copied])

    @property
    def _copies(self) -> bool:
        """Whether a step copies all parameters, not only those of which some rows stay."""
        return self.gate is not None and not self.one_pass

    def detach(self) -> None:
        """Remove the hooks: the optimizer is plain again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._theta, self._values = [], [], {}

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs besides the state of the model and of the optimizer."""
        memory = memory_of(self.evidence)
        return {
            "ranks": self.engine.world if self.engine.sharded else 1,
            "gate": None if self.gate is None else self.gate.state_dict(),
            "vectors": [[g.clone() for g in vector] for vector in self.vectors],
            "memory": None if memory is None else memory.state_dict(),
            "refreshes": self.refreshes,
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state; its parameters must have the same shapes and the same number of shards."""
        self._bind()
        ranks = self.engine.world if self.engine.sharded else 1
        if state["ranks"] != ranks:
            raise ValueError(
                f"the saved guard state is one of {state['ranks']} shards and this run has {ranks}; to change the "
                "number of processes, save and load it with cplus.distributed.checkpoint.save and load"
            )
        params = [local(p) for p in self.params]
        for vector in state["vectors"]:
            if [g.shape for g in vector] != [p.shape for p in params]:
                raise ValueError("the saved guard state belongs to other parameters: their shapes differ")
        if self.gate is not None:
            self.gate.load_state_dict(state["gate"], params)
        # A projection's many vectors that were squeezed into 16 bits stay in the host's memory.
        self.vectors = [
            [
                g if self.projection and g.dtype == torch.bfloat16 else g.to(p.device, copy=True)
                for g, p in zip(vector, params, strict=True)
            ]
            for vector in state["vectors"]
        ]
        if (memory := memory_of(self.evidence)) is not None:
            memory.load_state_dict(state["memory"], params)
        self.refreshes, self.steps = int(state["refreshes"]), int(state["steps"])

    @torch.no_grad()
    def _before(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Copy the parameters and check the gradients; with a closure, they are checked after it has run."""
        if nested(self.optimizer):
            return None
        self._bind()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.engine.check_gradients(self.optimizer, self.params, self.names, self.steps + 1)
        if self.evidence is not None and not self._idle:
            if self.refresh_every is not None and self.steps % self.refresh_every == 0:
                with torch.enable_grad():
                    self.refresh()
            if not self._kept:
                raise RuntimeError(
                    "no evidence yet: call guard.refresh() before the first step, or pass refresh_every=n"
                )
        now = self.engine.stepping(self.params)
        if self._copies:
            self._theta = kernels.copies([local(self.params[i]) for i in now])
        self._values = {
            i: self._theta[i - now[0]] if self._theta else local(self.params[i]).clone()
            for i in now
            if i in self._still
        }
        self._proposing = False
        if closure is None:
            self._ready()
            return None

        def evaluate() -> Any:
            try:
                loss = closure()
                with torch.no_grad():
                    self.engine.check_gradients(self.optimizer, self.params, self.names, self.steps + 1)
                    self._ready()
            except BaseException as error:
                self._undo()
                error.add_note(f"raised by the closure of step {self.steps + 1}; the parameters are unchanged")
                raise
            return loss

        return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})

    def _ready(self) -> None:
        """With the new data's gradients computed: project them, arm our AdamW, note what must not change."""
        for p in self._unlisted:
            if p.grad is not None and any(p is q for group in self.optimizer.param_groups for q in group["params"]):
                raise RuntimeError(
                    f"{self._name(p)} does not require a gradient but has one, which the optimizer would apply "
                    "without the gate; set its .grad to None, or make it require gradients before protect()"
                )
        used = [i for i, p in enumerate(self.params) if p.grad is not None]
        self._proposing = bool(used)
        if self.projection is not None and self._kept:
            gradients = [g for i in used if (g := self.params[i].grad) is not None]
            self.projection(gradients, [[vector[i] for i in used] for vector in self.vectors])
        if self.one_pass and self._proposing and not self._idle:
            assert self.gate is not None
            show = self._show_armed if self.observers else None
            arm(self.optimizer, self.gate, self.params, self._kept[0], self.steps + 1, show)
        self._unlisted_versions = self.engine.versions(self._unlisted)

    @torch.no_grad()
    def _undo(self) -> None:
        """Restore the parameters to their values before a step that failed."""
        for i, theta in zip(self.engine.stepping(self.params), self._theta, strict=False):
            local(self.params[i]).copy_(theta)
        self._put_back()
        self._theta, self._values = [], {}
        if isinstance(self.optimizer, AdamW):
            self.optimizer.armed = None

    @torch.no_grad()
    def _after(self, *_: object) -> None:
        """The optimizer has done line 9 of the algorithm; apply lines 10-13 to its proposal.

        Paper: Algorithm 1, line 9.    delta = proposed - theta, momentum and weight decay included
        """
        if nested(self.optimizer):
            return
        moved = [p for p, v in zip(self._unlisted, self._unlisted_versions, strict=False) if p._version != v]
        if moved:
            self._undo()
            raise RuntimeError(
                f"the optimizer's step moved {self._name(moved[0])}, which is not among the parameters it was "
                "protected with and so bypassed the gate; protect the optimizer that lists it. The listed parameters "
                "are restored to their values before the step"
            )
        self._put_back()
        now = self.engine.stepping(self.params)
        try:
            if self._gated(now):
                self.steps += now[-1] == len(self.params) - 1  # ZeRO steps its partitions one after another
        finally:
            self._put_back()  # interpolating between two equal numbers may still turn -0.0 into 0.0
            self._theta, self._values = [], {}
            self._versions = self.engine.versions(self.params)

    def _put_back(self) -> None:
        """Undo what was done to rows that do not train."""
        for i, before in self._values.items():
            p = local(self.params[i])
            p.copy_(torch.where(self._still[i], before, p))

    def _gated(self, now: range) -> bool:
        """Gate the proposal that the parameters hold, whether it was a step or not; our AdamW has gated its own."""
        gate = self.gate
        if gate is None or self.one_pass:
            if isinstance(self.optimizer, AdamW) and self.optimizer.armed is not None:
                self.optimizer.armed = None
                raise RuntimeError(
                    "the step did not run the gated kernel of cplus.optim.AdamW, so the parameters moved without the "
                    "gate; load the last checkpoint and call optimizer.step() as it is, neither compiled nor overridden"
                )
            return self._proposing and not self._idle
        proposed = [local(self.params[i]) for i in now]
        if not self._stepped(proposed):
            return False
        if self.evidence is not None and not self._kept:
            torch._foreach_copy_(proposed, self._theta)
            raise RuntimeError(
                "the optimizer moved parameters at learning rate 0; call guard.refresh() before the first step"
            )
        moments: list[Tensor | None] = [None] * len(now)
        if gate.average is None:  # the paper's gate does not read them
            moments = first_moments(self.optimizer, [self.params[i] for i in now])
        proposals = [
            self._proposal(i, theta, q, m) for i, theta, q, m in zip(now, self._theta, proposed, moments, strict=True)
        ]
        if self.compiled:
            apply_compiled(gate, proposals, self._kept[0], self.steps + 1, self._show if self.observers else None)
            return True
        for proposal, c in zip(proposals, gate.coefficients(proposals), strict=True):
            self._show(proposal, c)
            proposal.proposed.copy_(algorithm.apply(proposal.theta, proposal.proposed, c))
        return True

    def _stepped(self, proposed: Sequence[Tensor]) -> bool:
        """Whether this was a step: there were gradients at a learning rate above 0, or parameters moved anyway.

        A fused optimizer fires its hooks even if the gradient scaler makes it skip; that is not a step.
        """
        found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return False
        if self._proposing and not self._idle:
            return True
        moved = not all(torch.equal(t, p) for t, p in zip(self._theta, proposed, strict=True))
        return any(self.engine.sums([moved], proposed[0].device))  # all processes count the same steps

    def _proposal(self, position: int, theta: Tensor, proposed: Tensor, momentum: Tensor | None = None) -> Proposal:
        gradient = self.params[position].grad
        return Proposal(
            theta=theta,
            proposed=proposed,
            g_hat=self._kept[0][position] if self._kept else None,
            gradient=None if gradient is None else local(gradient),
            momentum=None if momentum is None else local(momentum),
            position=position,
        )

    def _show(self, proposal: Proposal, c: Tensor) -> None:
        for observer in self.observers:
            observer(proposal.position, proposal, c)

    def _show_armed(self, position: int, theta: Tensor, proposed: Tensor) -> None:
        """Show what our AdamW has gated; where a tensor does not train, nothing was proposed."""
        if position in self._still:
            proposed = torch.where(self._still[position], theta, proposed)
        proposal = self._proposal(position, theta, proposed)
        assert self.gate is not None
        self._show(proposal, self.gate.applied(proposal))

    @cached_property
    def compiled(self) -> bool:
        """Whether the gate runs as one compiled pass."""
        return self.compiles(sum(p.numel() for p in self.params))

    def compiles(self, parameters: int) -> bool:
        """Whether the gate would be compiled with this many parameters; for small models compiling costs too much."""
        gate = self.gate
        if gate is None or self.projection is not None or (gate.average is None and gate.uses != "coefficients"):
            return False
        if parameters < kernels.WORTH_COMPILING or not self.engine.compiles(self.params, kernels.LEAST):
            return False
        return all(kernels.fits(local(p)) for p in self.params) and kernels.can_compile(self.params[0].device.type)

    @property
    def one_pass(self) -> bool:
        """Whether the optimizer gates its own proposal, without a copy of the parameters."""
        return isinstance(self.optimizer, AdamW) and self.compiled

    @property
    def _idle(self) -> bool:
        return self.engine.idle(self.optimizer)

    def _name(self, p: nn.Parameter) -> str:
        return repr(self.names.get(id(p), "a parameter outside the model"))
