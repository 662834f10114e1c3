"""`protect`: the gate on any torch optimizer, through step hooks; the optimizer object itself is unchanged."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cplus.base.environment import check_versions
from cplus.core import kernels
from cplus.core.engine import (
    bare,
    check_predicts_tokens,
    check_supported,
    engine_of,
    in_model,
    local,
    shape_of,
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
from cplus.core.gates import Collaborative, Gate
from cplus.core.gating import Gating, Observer
from cplus.core.optim import nested
from cplus.core.rows import ZERO_EVIDENCE, Encoded

OnlyRows: TypeAlias = Mapping[str, Sequence[int]]
"""The rows that train, by the name of their parameter; all rows of the other parameters do."""
Projection: TypeAlias = Callable[[Sequence[Tensor], Sequence[Sequence[Tensor]]], None]
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def protect(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    anchors: Sequence[Encoded] = (),
    probes: Sequence[Encoded] = (),
    anchor_weight: float = 0.5,
    evidence: Sequence[Entry] = (),
    beta: float = 0.9,
    ema: kernels.EmaType = "uint8",
    refresh_every: int | None = None,
    only_rows: OnlyRows | None = None,
    allow_16bit: bool = False,
) -> Guard:
    """CPLUS on this optimizer: call `guard.refresh()` at the start of each epoch, then train as before.

    The evidence is rows of tokens, `anchors` and `probes`, or any loss: `evidence` lists a weight, the batches and a
    function `loss(model, batch)` for each source. Either anchors or probes may be empty; the other then has all the
    weight. `refresh_every=n` refreshes automatically before the first and every n-th step.
    `ema` is the type of the gate's average: float32 is the paper's, uint8 takes a byte per parameter instead of four.
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
            chosen(guard.params, 0)  # refuses now what a refresh would
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
    """What `protect` is given, as evidence: losses, or the paper's cross-entropy of anchors and probes."""
    if evidence and (anchors or probes):
        raise ValueError(
            "give anchors and probes, or evidence, not both; rows of tokens become evidence by the loss "
            "lambda model, rows: cplus.core.losses.answer_losses(model, rows).mean()"
        )
    if evidence:
        return LossGradient(model=model, sources=sources(evidence))
    if not 0.0 <= anchor_weight <= 1.0:
        raise ValueError(f"anchor_weight must lie in [0, 1], got {anchor_weight}")
    if not anchors and not probes:
        raise ValueError("protect needs evidence of past behaviour: give anchors, probes or both; got neither")
    check_predicts_tokens(model)
    weight = anchor_weight if anchors and probes else float(bool(anchors))
    parts = (("anchors", weight, anchors), ("probes", 1.0 - weight, probes))
    chosen = tuple(Source(name=name, weight=own, rows=rows) for name, own, rows in parts if rows)
    return MeanGradient(model=model, sources=chosen)


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


def row_numbers(name: str, shape: torch.Size, rows: Sequence[int]) -> list[int]:
    """The row numbers in order, each once."""
    if not shape:
        raise ValueError(f"only_rows names {name!r}, which is a single number and has no rows")
    listed = rows.tolist() if isinstance(rows, Tensor) else rows
    wrong = [listed] if not isinstance(listed, Iterable) else [row for row in listed if type(row) is not int]
    if wrong:
        raise TypeError(f"the rows of {name!r} must be a list of whole numbers counted from 0, got {wrong[0]!r}")
    outside = [row for row in listed if not 0 <= row < shape[0]]
    if outside:
        raise ValueError(
            f"{name!r} has the rows 0 to {shape[0] - 1}, and only_rows names {outside[0]}; after adding tokens, call "
            "model.resize_token_embeddings() before building the optimizer"
        )
    if not listed:
        raise ValueError(f"only_rows gives {name!r} no row to train; set requires_grad=False instead to freeze it")
    return sorted(set(listed))


def no_copy(protocol: int) -> Any:
    """In the place of a protected optimizer's own pickling, which leaves the hooks out."""
    raise TypeError(
        "a protected optimizer cannot be copied or pickled, because the copy's steps would not be gated; save its "
        "state_dict() and the guard's, or call guard.detach() first"
    )


class Guard(AbstractContextManager["Guard"]):
    """Evidence, projection and gate around one optimizer's step; owns all of its state."""

    gating: Gating

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
        self.refresh_every, self.allow_16bit, self.only_rows = refresh_every, allow_16bit, dict(only_rows or {})
        self.refreshes = self.steps = 0
        self.observers: list[Observer] = []
        self.params: list[nn.Parameter] = []
        self._dtypes: list[torch.dtype] = []
        self._versions: list[int] = []
        self._bind()
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]
        vars(self.optimizer)["__reduce_ex__"] = no_copy

    def _bind(self) -> None:
        """Bind the optimizer's parameters; they may be replaced, as sharding does, only before the first refresh."""
        params = self.engine.params(self.optimizer)
        if len(params) == len(self.params) and all(p is q for p, q in zip(params, self.params, strict=True)):
            if [p.dtype for p in params] != self._dtypes:
                raise ValueError(
                    "the parameters' precision changed after protect(); convert the model before protect()"
                )
            return
        if self.params and self.gating.kept:
            raise ValueError("the optimizer's parameters changed after protect(); detach the guard and protect again")
        self.engine = engine_of(self.model, params)
        self.names, self._dtypes = self.engine.names(), [p.dtype for p in params]
        self.names |= {id(p): self.names[id(q)] for p in params if id(q := in_model(p)) in self.names}
        for p in params:
            check_supported(p, self.names.get(id(p), "a parameter outside the model"), allow_16bit=self.allow_16bit)
        whole = self.projection or memory_of(self.evidence) or (self.gate is not None and self.gate.whole)
        self.engine.check(params, whole=bool(whole), refresh_every=self.refresh_every)
        trained = self.engine.trained(params)
        self.training_rows = rows_that_train(self.only_rows, self.engine.module, trained)
        listed = {id(p) for p in [*params, *trained]}
        held = [*self.model.parameters(), *(p for group in self.optimizer.param_groups for p in group["params"])]
        self._unlisted = list({id(p): p for p in held if id(p) not in listed}.values())  # a step must not move them
        self._unlisted_versions: list[int] = []
        self.params = params
        self.gating = Gating(
            self.optimizer,
            self.engine,
            params,
            self.gate,
            projected=self.projection is not None,
            still=self.engine.held_still(self.training_rows, params),
            observers=self.observers,
        )

    def refresh(self) -> Reference:
        """Compute the evidence at the current parameters and use it until the next refresh."""
        self._bind()
        if self.evidence is None:
            raise ValueError("this guard's gate reads no evidence, so there is nothing to refresh")
        self.engine.check_earlier_gradients(gated=self.gate is not None)
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
        self.gating.keep(reference.vectors)
        self.refreshes += 1
        self._versions = self.engine.versions(self.params)
        return reference

    @property
    def vectors(self) -> list[list[Tensor]]:
        """The evidence in use: gradients, or their signs if the gate reads nothing else."""
        return self.gating.vectors()

    @property
    def one_pass(self) -> bool:
        """Whether the optimizer gates its own proposal, without a copy of the parameters."""
        return self.gating.one_pass

    @property
    def nbytes(self) -> int:
        """The memory held between steps: evidence and gate."""
        memory = memory_of(self.evidence)
        evidence = sum(g.nbytes for vector in self.gating.kept for g in vector) + (memory.nbytes if memory else 0)
        return evidence + (0 if self.gate is None else self.gate.nbytes)

    @property
    def step_nbytes(self) -> int:
        """The additional memory during a step: any optimizer but our AdamW needs a copy of the parameters."""
        copied = range(len(self.params)) if self.gating.copies else self.gating.still
        sizes = [local(self.params[i]).nbytes for i in copied]
        return max(sizes, default=0) if self.engine.one_by_one else sum(sizes)

    def detach(self) -> None:
        """Remove the hooks; refuse, as a refresh does, a gradient that was not finite."""
        for hook in self._hooks:
            hook.remove()
        vars(self.optimizer).pop("__reduce_ex__", None)
        self.gating.end()
        self.engine.check_earlier_gradients(gated=self.gate is not None)

    def __exit__(self, *_: object) -> None:
        self.detach()

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs besides the state of the model and of the optimizer."""
        self.engine.check_earlier_gradients(gated=self.gate is not None)
        return {
            "ranks": self.engine.shards,
            "gate": None if self.gate is None else self.gate.state_dict(),
            "vectors": [[g.clone() for g in vector] for vector in self.vectors],
            "memory": None if (memory := memory_of(self.evidence)) is None else memory.state_dict(),
            "refreshes": self.refreshes,
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state; its parameters must have the same shapes and the same number of shards."""
        self._bind()
        if state["ranks"] != self.engine.shards:
            raise ValueError(
                f"the saved guard state is one of {state['ranks']} shards and this run has {self.engine.shards}; to "
                "change the number of processes, save and load it with cplus.distributed.checkpoint.save and load"
            )
        params = [local(p) for p in self.params]
        if any([g.shape for g in vector] != [p.shape for p in params] for vector in state["vectors"]):
            raise ValueError("the saved guard state belongs to other parameters: their shapes differ")
        if self.gate is not None:
            self.gate.load_state_dict(state["gate"], params)

        def placed(g: Tensor, p: Tensor) -> Tensor:
            """On the parameter's device; a projection's vectors that were squeezed into 16 bits stay on the host."""
            return g if self.projection and g.dtype == torch.bfloat16 else g.to(p.device, copy=True)

        self.gating.keep([list(map(placed, vector, params)) for vector in state["vectors"]])
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
        if self.evidence is not None and not self.gating.idle:
            if self.refresh_every is not None and self.steps % self.refresh_every == 0:
                with torch.enable_grad():
                    self.refresh()
            if not self.gating.kept:
                raise RuntimeError(
                    "no evidence yet: call guard.refresh() before the first step, or pass refresh_every=n"
                )
        self.gating.begin()
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
                self.gating.undo()
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
        self.gating.proposing = bool(used)
        if self.projection is not None and self.gating.kept:
            gradients = [g for i in used if (g := self.params[i].grad) is not None]
            self.projection(gradients, [[vector[i] for i in used] for vector in self.vectors])
        self.gating.arm(self.steps + 1)
        self._unlisted_versions = self.engine.versions(self._unlisted)

    @torch.no_grad()
    def _after(self, *_: object) -> None:
        """The optimizer has done line 9 of the algorithm; apply lines 10-13 to its proposal.

        Paper: Algorithm 1, line 9.    delta = proposed - theta, momentum and weight decay included
        """
        if nested(self.optimizer):
            return
        moved = [p for p, v in zip(self._unlisted, self._unlisted_versions, strict=False) if p._version != v]
        if moved:
            self.gating.undo()
            raise RuntimeError(
                f"the optimizer's step moved {self._name(moved[0])}, which is not among the parameters it was "
                "protected with and so bypassed the gate; protect the optimizer that lists it. The listed parameters "
                "are restored to their values before the step"
            )
        self.gating.put_back()
        try:
            if self.gating.stepped():
                if self.evidence is not None and not self.gating.kept:
                    self.gating.undo()
                    raise RuntimeError(
                        "the optimizer moved parameters at learning rate 0; call guard.refresh() before the first step"
                    )
                self.steps += self.gating.apply(self.steps + 1)
        finally:
            self.gating.put_back()  # interpolating between two equal numbers may still turn -0.0 into 0.0
            self.gating.end()
            self._versions = self.engine.versions(self.params)

    def _name(self, p: nn.Parameter) -> str:
        return repr(self.names.get(id(p), "a parameter outside the model"))
